"""Quantised weights: codes of a few bits, with a scale and perhaps a minimum for each group of inputs of an output.

Backends that multiply codes take them as they are; for all others ``dequantize`` says what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

ZERO = 128
"""What codes of 8 bits without minimums count from."""

_CHUNK = 1 << 22
"""Weights rounded at a time, so that what is computed on the way stays small."""

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [outputs, inputs] that is ``scale * (code - 128)``, or with minimums ``scale * code + minimum``.

    codes: [outputs, inputs] uint8. scales, minimums: [outputs, groups] float16. bits: 8, or 4 (codes below 16, with
    minimums). digits: bytes of the integers that inputs are rounded to where codes are multiplied: 1 is fast, 2 finer
    than bfloat16.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    bits: int
    digits: int

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """[outputs, inputs], computed in float32 and rounded once."""
        out = torch.empty(self.shape, dtype=dtype)
        for rows in _chunks(self.shape):
            codes = _grouped(self.codes[rows], self.group).float()
            if self.minimums is None:
                values = (codes - ZERO) * self.scales[rows].float()[:, :, None]
            else:
                values = codes * self.scales[rows].float()[:, :, None] + self.minimums[rows].float()[:, :, None]
            out[rows] = values.flatten(1)
        return out

    def reordered(self, order: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """With ``order`` applied to the rows of all its tensors."""
        minimums = None if self.minimums is None else order(self.minimums)
        return replace(self, codes=order(self.codes), scales=order(self.scales), minimums=minimums)

    @staticmethod
    def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """All outputs of ``parts``, which have the same inputs, groups and digits."""
        if any(part.minimums is not None for part in parts):
            parts = [_with_minimums(part) for part in parts]
        minimums = [part.minimums for part in parts if part.minimums is not None]
        return QuantizedWeight(
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            minimums=torch.cat(minimums) if minimums else None,
            bits=max(part.bits for part in parts),
            digits=parts[0].digits,
        )


def to_int8(weight: torch.Tensor, group: int = 64) -> QuantizedWeight:
    """``weight [outputs, inputs]`` rounded to 8 bits, evenly to both sides of zero. inputs: a multiple of ``group``."""
    scales = (_grouped(weight, group).abs().amax(2).float() / 127).half()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for rows in _chunks(weight.shape):
        parts = _grouped(weight[rows].float(), group) / _divisor(scales[rows])
        codes[rows] = (parts.round().clamp(-127, 127) + ZERO).to(torch.uint8).flatten(1)
    return QuantizedWeight(codes, scales, None, bits=8, digits=1)


def to_int4(weight: torch.Tensor, group: int = 32) -> QuantizedWeight:
    """``weight [outputs, inputs]`` rounded to 16 steps for each group of inputs, a divisor of theirs.

    The steps span from a group's least to its greatest weight, or somewhat less where that leaves a smaller sum of
    squared errors: cutting an outlier makes all other steps finer.
    """
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float16)
    minimums = torch.empty_like(scales)
    for rows in _chunks(weight.shape):
        parts = _grouped(weight[rows].float(), group)
        least, greatest = parts.amin(2), parts.amax(2)
        best = torch.full_like(least, torch.inf)
        chosen = torch.empty_like(parts)
        for shrink in _SHRINKS:
            middle, half = (least + greatest) / 2, (greatest - least) / 2 * shrink
            minimum, scale = (middle - half).half(), (2 * half / 15).half()
            rounded = ((parts - minimum.float()[:, :, None]) / _divisor(scale)).round().clamp(0, 15)
            values = rounded * scale.float()[:, :, None] + minimum.float()[:, :, None]
            error = (values - parts).square().sum(2)
            better = error < best
            best = torch.where(better, error, best)
            chosen = torch.where(better[:, :, None], rounded, chosen)
            scales[rows] = torch.where(better, scale, scales[rows])
            minimums[rows] = torch.where(better, minimum, minimums[rows])
        codes[rows] = chosen.to(torch.uint8).flatten(1)
    return QuantizedWeight(codes, scales, minimums, bits=4, digits=1)


def _with_minimums(weight: QuantizedWeight) -> QuantizedWeight:
    return weight if weight.minimums is not None else replace(weight, minimums=-ZERO * weight.scales)


def _grouped(rows: torch.Tensor, group: int) -> torch.Tensor:
    return rows.reshape(len(rows), -1, group)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """[..., 1] float32; 1 where a group is all zeros, or too small for a scale."""
    return torch.where(scales == 0, 1, scales.float())[:, :, None]


def _chunks(shape: torch.Size) -> list[slice]:
    step = max(1, _CHUNK // shape[1])
    return [slice(row, row + step) for row in range(0, shape[0], step)]
