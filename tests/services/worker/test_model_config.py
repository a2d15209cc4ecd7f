"""config.json of every architecture, in the form of transformers 5 and of its predecessors, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.models.config import ModelConfig
from shared.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}


def load(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.load(folder)


def of(model_type: str, **changes: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [f"{model_type.title()}ForCausalLM"], "model_type": model_type} | changes


def test_defaults_of_llama(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps) == (16, 2, 1e-6)
    assert not (config.tied or config.qkv_bias or config.out_bias or config.mlp_bias or config.qk_norm)
    assert config.windows == (0, 0, 0, 0)
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert config.eos_ids == (2,)


def test_biases_of_llama(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 32})
    assert config.qkv_bias and config.out_bias and config.mlp_bias
    assert config.head_dim == 32


@pytest.mark.parametrize("window", [None, 4096])
def test_mistral_slides_in_every_layer(tmp_path: Path, window: int | None) -> None:
    assert load(tmp_path, of("mistral", sliding_window=window)).windows == (window or 0,) * 4


def test_qwen2_has_biases_on_qkv_only_and_windows_where_told(tmp_path: Path) -> None:
    config = load(tmp_path, of("qwen2", sliding_window=64, use_sliding_window=False))
    assert config.qkv_bias and not config.out_bias
    assert config.windows == (0, 0, 0, 0)
    config = load(tmp_path, of("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=3))
    assert config.windows == (0, 0, 0, 64)


def test_qwen3_norms_queries_and_keys(tmp_path: Path) -> None:
    config = load(tmp_path, of("qwen3", head_dim=128))
    assert config.qk_norm and not config.qkv_bias
    assert config.head_dim == 128


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_in_old_and_new_files(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = load(tmp_path, LLAMA | rope)
    assert (config.rope.kind, config.rope.theta, config.rope.params["factor"]) == ("linear", 5e5, 2.0)
    assert config.max_model_len(None) == 4096


@pytest.mark.parametrize(("eos", "ids"), [(7, (7,)), ([7, 8], (7, 8)), (None, ())])
def test_eos_ids(tmp_path: Path, eos: Any, ids: tuple[int, ...]) -> None:
    assert load(tmp_path, LLAMA | {"eos_token_id": eos}).eos_ids == ids


def test_max_model_len_above_the_limit_names_both(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA)
    assert config.max_model_len(100) == 100
    with pytest.raises(ConfigError, match=r"--max-model-len 4096 is above the model's limit of 2048 tokens"):
        config.max_model_len(4096)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "architecture FalconForCausalLM is not supported; supported are Ll"),
        ({"model_type": "llama"}, "architecture none is not supported"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads 8 is no multiple of 3"),
        (LLAMA | {"hidden_size": "many"}, "config.json: .*hidden_size"),
    ],
)
def test_what_cannot_work_is_named_in_one_line(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, config)
    assert "\n" not in str(caught.value)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        ModelConfig.load(tmp_path)
