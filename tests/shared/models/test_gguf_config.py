from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shared.errors import ConfigError
from shared.models.gguf_config import config, end_ids, generation_config
from shared.models.gguf_file import GGUFFile
from tests.shared.models.build import Writer, tiny

COMPARED = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rope_parameters",
    "tie_word_embeddings",
    "eos_token_id",
    "hidden_act",
]


def read(path: Path) -> dict[str, Any]:
    return config(GGUFFile.read(path))


def as_transformers_config(path: Path, folder: Path) -> Any:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(read(path)))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_config_is_the_one_transformers_reads_from_the_file(tmp_path: Path, arch: str) -> None:
    numbers = {"attention.key_length": 128, "attention.value_length": 128} if arch == "qwen3" else {}
    path = tiny(tmp_path / "m.gguf", arch=arch, pre="qwen2", **numbers, **{"rope.freq_base": 1e6})
    ours = as_transformers_config(path, tmp_path / "folder")
    theirs = AutoConfig.from_pretrained(str(tmp_path), gguf_file="m.gguf")
    assert type(ours) is type(theirs)
    for name in COMPARED:
        if arch == "qwen2" and name == "head_dim":
            continue
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rms_norm_eps == 1e-5 == pytest.approx(theirs.rms_norm_eps)


def test_untied_embeddings_are_seen_by_their_tensor(tmp_path: Path) -> None:
    made = Writer(tmp_path / "m.gguf")
    made.tensor("token_embd.weight", np.zeros((10, 64), np.float32))
    made.tensor("output.weight", np.zeros((10, 64), np.float32))
    assert read(made.close())["tie_word_embeddings"] is False
    assert read(tiny(tmp_path / "tied.gguf"))["tie_word_embeddings"] is True


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert read(tiny(tmp_path / "linear.gguf", **scaling))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    path = tiny(tmp_path / "yarn.gguf", **scaling)
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(path)["rope_scaling"] == expected
    assert as_transformers_config(path, tmp_path / "folder").rope_parameters["rope_type"] == "yarn"


def test_no_scaling_is_none(tmp_path: Path) -> None:
    assert read(tiny(tmp_path / "a.gguf"))["rope_scaling"] is None
    assert read(tiny(tmp_path / "b.gguf", **{"rope.scaling.type": "none"}))["rope_scaling"] is None
    with pytest.raises(ConfigError, match="rope scaling 'odd' is not supported"):
        read(tiny(tmp_path / "c.gguf", **{"rope.scaling.type": "odd", "rope.scaling.factor": 2.0}))


def with_factors(path: Path, factors: list[float], theta: float) -> Path:
    made = Writer(path, **{"embedding_length": 512, "attention.key_length": 128, "rope.freq_base": theta})
    made.tensor("rope_freqs.weight", np.array(factors, np.float32))
    made.tensor("token_embd.weight", np.zeros((10, 512), np.float32))
    return made.close()


def llama3_factors(theta: float, factor: float) -> list[float]:
    """As convert_hf_to_gguf.py computes them for Llama 3.1: head_dim 128, original context 8192, low 1, high 4."""
    found = []
    for i in range(0, 128, 2):
        wavelength = 2 * math.pi * theta ** (i / 128)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequency_factors_become_their_formula(tmp_path: Path, factor: float) -> None:
    path = with_factors(tmp_path / "m.gguf", llama3_factors(500000.0, factor), 500000.0)
    assert read(path)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_frequency_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = [1.0 + i / 10 for i in range(64)]
    loaded = as_transformers_config(with_factors(tmp_path / "m.gguf", factors, 10000.0), tmp_path / "folder")
    frequencies, scale = ROPE_INIT_FUNCTIONS[loaded.rope_parameters["rope_type"]](loaded, torch.device("cpu"))
    expected = [10000.0 ** (-2 * i / 128) / factor for i, factor in enumerate(factors)]
    assert scale == 1.0
    torch.testing.assert_close(frequencies, torch.tensor(expected))


def test_end_ids_are_the_models_own_then_the_turn_ends(tmp_path: Path) -> None:
    file = GGUFFile.read(tiny(tmp_path / "m.gguf"))
    assert end_ids(file) == [2, 0]  # <|im_end|>, which the file names, and <|endoftext|>
    assert generation_config(file) == {"eos_token_id": [2, 0]}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"arch": "mamba"}, r"architecture 'mamba' is not supported; supported are llama, qwen2, qwen3"),
        ({"expert_count": 8}, "mixture-of-experts"),
        ({"embedding": False}, r"no tensor token_embd\.weight"),
        ({"block_count": None}, r"llama\.block_count is None"),
        ({"block_count": 0}, r"llama\.block_count is 0"),
        ({"rope.dimension_count": 8}, "rotary embedding of 8 of 16"),
        ({"context_length": "long"}, r"llama\.context_length is 'long'"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tiny(tmp_path / "bad.gguf", **numbers))
    assert "bad.gguf" in str(caught.value)


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    made = Writer(tmp_path / "m-00001-of-00002.gguf")
    made.writer.add_uint16("split.count", 2)
    with pytest.raises(ConfigError, match="one part of a split GGUF"):
        read(made.close())
