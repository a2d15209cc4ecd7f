"""Rotary position tables: the frequencies of each scaling method, as cos and sin per position.

Sources: RoPE (Su et al., arXiv 2104.09864); linear interpolation (Chen et al., arXiv 2306.15595); NTK-aware and YaRN
(Peng et al., arXiv 2309.00071); LongRoPE (Ding et al., arXiv 2402.13753); Llama 3.1's scaling (its released code).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shared.errors import ConfigError

TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """One model's rotary embedding. ``params`` are config.json's, ``max_position`` its max_position_embeddings."""

    kind: str
    theta: float
    head_dim: int
    max_position: int
    params: Mapping[str, Any]

    @classmethod
    def parse(cls, params: Mapping[str, Any], head_dim: int, max_position: int) -> Rope:
        """From rope_parameters (or rope_scaling with rope_theta added). Raises ConfigError naming what it lacks."""
        kind = params.get("rope_type") or params.get("type") or "default"
        kind = {"su": "longrope", "ntk": "dynamic"}.get(kind, kind)
        if kind not in TYPES:
            raise ConfigError(f"rope_type {kind!r} is not supported; supported: {', '.join(TYPES)}")
        if params.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"partial_rotary_factor {params['partial_rotary_factor']} is not supported, only 1")
        needed = {
            "linear": ["factor"],
            "dynamic": ["factor"],
            "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
            "longrope": ["short_factor", "long_factor"],
        }.get(kind, [])
        for name in needed:
            if params.get(name) is None:
                raise ConfigError(f"config.json: rope_type {kind!r} needs {name!r}")
        if kind == "longrope":
            for name in ("short_factor", "long_factor"):
                if len(params[name]) != head_dim // 2:
                    raise ConfigError(f"config.json: {name} has {len(params[name])} entries, not {head_dim // 2}")
        return cls(kind, float(params.get("rope_theta") or 10000.0), head_dim, max_position, dict(params))

    @property
    def original_max_position(self) -> int:
        """The context length before scaling."""
        return int(self.params.get("original_max_position_embeddings") or self.max_position)

    @property
    def limit(self) -> int:
        """The longest sequence the model is made for: for some methods config.json gives it unscaled."""
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position * self.params["factor"])
        if self.kind == "yarn":
            return max(self.max_position, int(self.original_max_position * self._factor()))
        return self.max_position

    def table(self, length: int) -> torch.Tensor:
        """[length, head_dim] float32 for sequences of at most ``length``: cosines, then sines, of each position."""
        inverse = self._inverse_frequencies(length)
        angles = torch.arange(length).float().unsqueeze(1) * inverse
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self._attention_factor()

    def _inverse_frequencies(self, length: int) -> torch.Tensor:
        """[head_dim / 2], or for dynamic NTK [length, head_dim / 2]."""
        exponents = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        plain = torch.pow(self.theta, exponents).reciprocal()
        match self.kind:
            case "linear":
                return plain / self._factor()
            case "dynamic":
                # The base grows with the sequence. A token is rotated by the length at which it was decoded, which
                # makes its key final: what is stored never has to be rotated again.
                grown = torch.arange(1, length + 1).clamp(min=self.max_position).float() / self.max_position
                factor = self.params["factor"]
                base = self.theta * (factor * grown - (factor - 1)) ** (self.head_dim / (self.head_dim - 2))
                return torch.pow(base.unsqueeze(1), exponents).reciprocal()
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(plain)
            case "longrope":
                # Chosen once for the longest sequence, not per request: keys of both kinds do not mix.
                name = "long_factor" if length > self.original_max_position else "short_factor"
                return plain / torch.tensor(self.params[name], dtype=torch.float32)
        return plain

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        factor, low, high = (float(self.params[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        turns = self.original_max_position * plain / (2 * math.pi)  # in the original context
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * plain / factor + smooth * plain

    def _yarn(self, plain: torch.Tensor) -> torch.Tensor:
        def dimension(turns: float) -> float:
            """The dimension that makes ``turns`` rotations in the original context."""
            wavelength = self.original_max_position / (turns * 2 * math.pi)
            return self.head_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low = dimension(self.params.get("beta_fast") or 32)
        high = dimension(self.params.get("beta_slow") or 1)
        if self.params.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp
        ramp = ((torch.arange(self.head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
        return plain / self._factor() * ramp + plain * (1 - ramp)

    def _factor(self) -> float:
        return float(self.params.get("factor") or self.max_position / self.original_max_position)

    def _attention_factor(self) -> float:
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.params.get("attention_factor") is not None:
            return float(self.params["attention_factor"])
        factor = self._factor()
        if factor <= 1:
            return 1.0
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(factor) / math.log(self.original_max_position))
        mscale, mscale_all = self.params.get("mscale"), self.params.get("mscale_all_dim")
        if mscale and mscale_all:
            return float((0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1))
        return 0.1 * math.log(factor) + 1
