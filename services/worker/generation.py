"""generation_config.json: the ids that end an answer, and how a request is sampled that leaves it open."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.sampling import SamplingDefaults

FILE = "generation_config.json"
FIELDS: dict[str, tuple[str, type, Callable[[Any], bool], str]] = {
    "temperature": ("temperature", float, lambda value: 0 <= value < math.inf, "at least 0"),
    "top_p": ("top_p", float, lambda value: 0 < value <= 1, "in (0, 1]"),
    "top_k": ("top_k", int, lambda value: value >= -1, "at least -1"),
    "min_p": ("min_p", float, lambda value: 0 <= value <= 1, "in [0, 1]"),
    "repetition_penalty": ("repetition_penalty", float, lambda value: 0 < value <= 1000, "in (0, 1000]"),
    "presence_penalty": ("presence_penalty", float, lambda value: -2 <= value <= 2, "in [-2, 2]"),
    "frequency_penalty": ("frequency_penalty", float, lambda value: -2 <= value <= 2, "in [-2, 2]"),
    "max_new_tokens": ("max_tokens", int, lambda value: value >= 1, "at least 1"),
}
"""The file's name of each field, ours, its type and its range. All else in the file is transformers' own business."""


@dataclass(frozen=True)
class GenerationConfig:
    """eos_ids: empty when it names none, and those of config.json count."""

    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults

    @classmethod
    def load(cls, folder: Path | None, source: str, override: str) -> GenerationConfig:
        """``source``: "auto" is the file in the model's ``folder``, "vllm" only its EOS ids, all else is a path.

        override: JSON whose fields replace the file's. Raises ConfigError naming file or option, field and value.
        """
        found, where = _read(folder, source)
        eos = found.get("eos_token_id")
        defaults = {} if source == "vllm" else _defaults(found, where)
        try:
            changed = json.loads(override) if override else {}
        except ValueError as error:
            raise ConfigError(f"--override-generation-config: {override!r} is not JSON: {error}") from error
        if not isinstance(changed, dict):
            raise ConfigError(f"--override-generation-config: {override!r} is not a JSON object")
        unknown = sorted(changed.keys() - FIELDS.keys())
        if unknown:
            raise ConfigError(f"--override-generation-config: {unknown[0]!r} is not one of {', '.join(FIELDS)}")
        defaults.update(_defaults(changed, "--override-generation-config"))
        return cls(_ids(eos, where), SamplingDefaults(**defaults))


def _read(folder: Path | None, source: str) -> tuple[Mapping[str, Any], str]:
    """The file's object (empty where a model has none) and its name."""
    if source in ("auto", "vllm"):
        path = None if folder is None else folder / FILE
    else:
        path = Path(source) / FILE if Path(source).is_dir() else Path(source)
        if not path.is_file():
            raise ConfigError(f"--generation-config {source}: there is no file {path}")
    if path is None or not path.is_file():
        return {}, FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value, str(path)


def _defaults(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    defaults = {}
    for name, (ours, kind, allowed, rule) in FIELDS.items():
        value = found.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)) or not allowed(value):
            raise ConfigError(f"{where}: {name} is {value!r}, not {'an integer' if kind is int else 'a number'} {rule}")
        defaults[ours] = kind(value)
    return defaults


def _ids(eos: Any, where: str) -> tuple[int, ...]:
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(id) is not int for id in ids):
        raise ConfigError(f"{where}: eos_token_id is {eos!r}, not a token id or a list of them")
    return tuple(ids)
