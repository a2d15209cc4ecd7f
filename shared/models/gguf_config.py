"""A Hugging Face config.json and generation_config.json from GGUF metadata."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shared.errors import ConfigError
from shared.models.gguf_file import GGUFFile

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""GGUF architecture -> Hugging Face model_type and class. Mistral models are stored as llama."""

_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>")
"""Tokens that end a turn or a text wherever they exist as control tokens; llama.cpp treats them alike."""

_CONTROL = 3


def config(file: GGUFFile) -> dict[str, Any]:
    """config.json of ``file``. Raises ConfigError for what Quire cannot run, naming it."""
    arch = file.architecture()
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise ConfigError(f"{file.path} is one part of a split GGUF; merge the parts with llama-gguf-split first")
    if _optional(file, "expert_count", 0):
        raise ConfigError(f"{file.path}: mixture-of-experts models are not supported")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight: it does not hold a model's weights")
    model_type, class_name = ARCHITECTURES[arch]
    hidden, heads = _required(file, "embedding_length"), _required(file, "attention.head_count")
    head_dim = int(_optional(file, "attention.key_length", hidden // heads))
    rotary = int(_optional(file, "rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise ConfigError(f"{file.path}: rotary embedding of {rotary} of {head_dim} head dimensions is not supported")
    kv_heads = int(_uniform(file, "attention.head_count_kv", heads))
    context = _required(file, "context_length")
    made: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": _required(file, "feed_forward_length"),
        "num_hidden_layers": _required(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest(float(_optional(file, "attention.layer_norm_rms_epsilon", 1e-5))),
        "rope_theta": _shortest(float(_optional(file, "rope.freq_base", 10000.0))),
        "rope_scaling": _rope_scaling(file, context, head_dim),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "use_cache": True,
        **_token_ids(file),
    }
    if arch == "llama":
        made["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        made["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    return made


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """generation_config.json of ``file``: the ids that begin, pad and end a text."""
    made: dict[str, Any] = _token_ids(file)
    ends = end_ids(file)
    if ends:
        made["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return made


def end_ids(file: GGUFFile) -> list[int]:
    """The model's own end id first, then its end-of-turn ids."""
    metadata = file.metadata
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    for index, token in enumerate(metadata.get("tokenizer.ggml.tokens", [])[: len(kinds)]):
        if kinds[index] == _CONTROL and token in _END_TOKENS:
            ids.append(index)
    return list(dict.fromkeys(ids))


def _rope_scaling(file: GGUFFile, context: int, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _frequency_factors(file, head_dim)
    kind = _optional(file, "rope.scaling.type", "none")
    # Files from before 2023-11 give only a linear factor, under this older name.
    factor = float(_optional(file, "rope.scaling.factor", _optional(file, "rope.scale_linear", 1.0)))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    factor = _shortest(factor)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported; linear, yarn and llama3 are")
    original = int(_optional(file, "rope.scaling.original_context_length", context))
    made = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    attention = float(_optional(file, "rope.scaling.attn_factor", 1.0))
    if attention not in (0.0, 1.0):
        made["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    for name in ("beta_fast", "beta_slow"):
        value = _optional(file, f"rope.scaling.yarn_{name}", None)
        if value is not None:
            made[name] = _shortest(float(value))
    return made


def _frequency_factors(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Llama 3.1 files hold the divisor of each rotary frequency instead of the formula's four numbers.

    The formula is given back where it explains the divisors; any others go as longrope, whose definition is a list of
    divisors, with the same list for short and long texts and no change of attention's scale.
    """
    stored = np.frombuffer(file.blocks("rope_freqs.weight").tobytes(), np.float32).astype(np.float64)
    if len(stored) != head_dim // 2:
        raise ConfigError(f"{file.path}: rope_freqs.weight has {len(stored)} values, not half of head_dim {head_dim}")
    theta = float(_optional(file, "rope.freq_base", 10000.0))
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    if np.allclose(stored, 1.0 / ((1.0 - smooth) / factor + smooth), rtol=1e-3):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    context = _required(file, "context_length")
    return {
        "rope_type": "longrope",
        "short_factor": stored.tolist(),
        "long_factor": stored.tolist(),
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _optional(file: GGUFFile, key: str, default: Any) -> Any:
    return file.metadata.get(f"{file.architecture()}.{key}", default)


def _required(file: GGUFFile, key: str) -> int:
    value = _uniform(file, key, None)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{file.path}: metadata {file.architecture()}.{key} is {value!r}, not a positive number")
    return value


def _uniform(file: GGUFFile, key: str, default: Any) -> Any:
    """A number that some writers give once per layer."""
    value = _optional(file, key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ConfigError(f"{file.path}: {key} differs between layers, which is not supported")
        return value[0]
    return value


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for the 9.999999747e-06 that float32 made of it."""
    return float(str(np.float32(value)))
