"""generation_config.json: transformers' reading of it, vLLM's meaning of the options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig as Transformers

from services.worker.generation import GenerationConfig
from shared.errors import ConfigError
from shared.sampling import SamplingDefaults

QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def write(folder: Path, **config: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def test_a_models_own_file_as_transformers_writes_it(tmp_path: Path) -> None:
    Transformers(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=[5, 7]).save_pretrained(tmp_path)
    found = GenerationConfig.load(tmp_path, "auto", "")
    assert found == GenerationConfig((5, 7), SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20))
    assert str(found.defaults) == "temperature 0.6, top_p 0.95, top_k 20"


def test_vllm_keeps_only_the_eos_ids(tmp_path: Path) -> None:
    found = GenerationConfig.load(write(tmp_path, **QWEN3), "vllm", "")
    assert found == GenerationConfig((151645, 151643), SamplingDefaults())
    assert str(found.defaults) == "neutral"


@pytest.mark.parametrize("name", ["", "generation_config.json"])
def test_a_file_or_folder_elsewhere(tmp_path: Path, name: str) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        folder.mkdir()
    write(model, temperature=0.1, eos_token_id=1)
    write(other, max_new_tokens=64, repetition_penalty=1.1, min_p=0.05, eos_token_id=2)
    found = GenerationConfig.load(model, str(other / name), "")
    assert found == GenerationConfig((2,), SamplingDefaults(max_tokens=64, repetition_penalty=1.1, min_p=0.05))


@pytest.mark.parametrize("source", ["auto", "vllm"])
def test_override(tmp_path: Path, source: str) -> None:
    found = GenerationConfig.load(write(tmp_path, temperature=0.6, top_k=20), source, '{"temperature": 0, "top_p": 1}')
    assert found.defaults == SamplingDefaults(temperature=0, top_p=1, top_k=20 if source == "auto" else None)


def test_a_model_without_the_file(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        assert GenerationConfig.load(folder, "auto", "") == GenerationConfig((), SamplingDefaults())


@pytest.mark.parametrize(
    ("source", "override", "message"),
    [
        ("auto", "{", "--override-generation-config: '{' is not JSON"),
        ("auto", "[1]", r"--override-generation-config: '\[1\]' is not a JSON object"),
        ("auto", '{"beams": 2}', "--override-generation-config: 'beams' is not one of temperature, top_p"),
        ("auto", '{"top_p": 0}', r"--override-generation-config: top_p is 0, not a number in \(0, 1\]"),
        ("auto", '{"top_k": true}', "top_k is True, not an integer at least -1"),
        ("nowhere", "", "--generation-config nowhere: there is no file nowhere"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, source: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerationConfig.load(tmp_path, source, override)


def test_a_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json: temperature is 'hot', not a number at least 0"):
        GenerationConfig.load(write(tmp_path, temperature="hot"), "auto", "")
    with pytest.raises(ConfigError, match="eos_token_id is 'x', not a token id"):
        GenerationConfig.load(write(tmp_path, eos_token_id="x"), "auto", "")
