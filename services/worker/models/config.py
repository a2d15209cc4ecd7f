"""What the decoder needs to know of a model, read from the config.json of its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.models.rope import Rope
from shared.errors import ConfigError
from shared.models.folder import architecture as architecture_of


@dataclass(frozen=True)
class ModelConfig:
    """Shape and variant of one decoder. ``windows``: per layer, how many tokens it attends to (0: all)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int, ...]
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """From a Hugging Face folder. Raises ConfigError naming the file or field that cannot work."""
        raw = _read_json(folder / "config.json")
        if raw is None:
            raise ConfigError(f"{folder} has no config.json")
        architecture = architecture_of(folder, raw)
        config = _with_defaults(folder)
        bias = bool(getattr(config, "attention_bias", False))
        if config.hidden_act != "silu":
            raise ConfigError(f"config.json: hidden_act {config.hidden_act!r} is not supported, only 'silu'")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if heads % kv_heads:
            raise ConfigError(f"config.json: num_attention_heads {heads} is no multiple of {kv_heads} key/value heads")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope=Rope.parse(_rope_params(config), head_dim, config.max_position_embeddings),
            windows=_windows(architecture, config),
            tied=config.tie_word_embeddings,
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            out_bias=bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            eos_ids=_eos_ids(config),
        )

    def max_model_len(self, wanted: int | None) -> int:
        """The longest sequence served: the model's own limit unless ``wanted`` is shorter."""
        if wanted is not None and wanted > self.rope.limit:
            raise ConfigError(f"--max-model-len {wanted} is above the model's limit of {self.rope.limit} tokens")
        return wanted or self.rope.limit


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _with_defaults(folder: Path) -> Any:
    """transformers' view of config.json: files may leave out what is an architecture's default."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many unrelated types, according to which field is wrong
        raise ConfigError(f"{folder / 'config.json'}: {' '.join(str(error).split())}") from error


def _rope_params(config: Any) -> dict[str, Any]:
    """rope_parameters (transformers 5) or rope_theta and rope_scaling (before), as one flat dict."""
    params = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    if any(isinstance(value, dict) for value in params.values()):
        raise ConfigError("config.json: rope_parameters per layer type are not supported")
    for name in ("rope_theta", "original_max_position_embeddings"):
        if params.get(name) is None and getattr(config, name, None) is not None:
            params[name] = getattr(config, name)
    return params


def _windows(architecture: str, config: Any) -> tuple[int, ...]:
    window = int(getattr(config, "sliding_window", None) or 0)
    if architecture == "LlamaForCausalLM":
        window = 0
    if architecture == "MistralForCausalLM":
        return (window,) * int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if len(kinds) != config.num_hidden_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(f"config.json: layer_types {kinds} do not describe {config.num_hidden_layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _eos_ids(config: Any) -> tuple[int, ...]:
    eos = config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
