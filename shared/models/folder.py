"""Checks a Hugging Face folder before any process starts: what is missing or cut short is named at once."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_INDEX = "model.safetensors.index.json"


def check(path: Path) -> tuple[list[Path], str]:
    """The safetensors files of the folder ``path`` and a digest of its configuration and weights.

    Weights are known by the hash of their header and their size: reading gigabytes at every start would cost more than
    it tells. Raises ConfigError naming the file that is missing, unreadable, truncated or of an unsupported model.
    """
    digest = hashlib.sha256()
    config = _json(path / "config.json", digest)
    architecture(path, config)
    weights = _weights(path, digest)
    for shard in weights:
        digest.update(_check_safetensors(shard))
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"model folder {path} has no tokenizer (tokenizer.json)")
    return weights, digest.hexdigest()


def architecture(path: Path, config: Mapping[str, Any]) -> str:
    """Which of ARCHITECTURES the config.json of folder ``path`` names. Raises ConfigError for another model."""
    names = config.get("architectures") or []
    found = [name for name in names if name in ARCHITECTURES] if isinstance(names, list) else []
    if not found:
        shown = ", ".join(map(str, names)) if isinstance(names, list) and names else "none"
        raise ConfigError(
            f"{path / 'config.json'}: architecture {shown} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method is not None:
        raise ConfigError(f"{path / 'config.json'}: weights quantised by {method!r} are not supported")
    return str(found[0])


def _weights(path: Path, digest: hashlib._Hash) -> list[Path]:
    index = path / _INDEX
    if index.is_file():
        names = _json(index, digest).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ConfigError(f"{index} has no weight_map")
        shards = [path / name for name in sorted(set(names.values()))]
        for shard in shards:
            if not shard.is_file():
                raise ConfigError(f"model folder {path} lacks {shard.name}, which {_INDEX} names")
        return shards
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    others = sorted(p.name for pattern in ("*.bin", "*.pth", "*.gguf", "*.safetensors") for p in path.glob(pattern))
    hint = f"; it has {', '.join(others[:4])}" if others else ""
    raise ConfigError(f"model folder {path} has no weights (model.safetensors or {_INDEX}){hint}")


def _check_safetensors(path: Path) -> bytes:
    """The hash of the header and size of ``path``, whose length is checked against what its header promises."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as handle:
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > size - 8:
                raise ConfigError(
                    f"{path} is truncated or not safetensors: its header needs {length + 8} of {size} bytes"
                )
            header = handle.read(length)
        entries = json.loads(header)
        needed = 8 + length + max((e["data_offsets"][1] for k, e in entries.items() if k != "__metadata__"), default=0)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    if needed != size:
        raise ConfigError(f"{path} is truncated or corrupt: its tensors end at byte {needed}, the file at {size}")
    return hashlib.sha256(header + struct.pack("<Q", size)).digest()


def _json(path: Path, digest: hashlib._Hash) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"model folder {path.parent} has no {path.name}")
    try:
        content = path.read_bytes()
        value = json.loads(content)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    digest.update(content)
    return value
