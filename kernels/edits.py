"""What rules of single rows do to logits before they are sampled, as a batch of short lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowIds:
    """Token ids of S rows: row r's are ``ids[bounds[r] : bounds[r + 1]]`` (int64), with values (float32) where they
    have any."""

    bounds: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """In this order: all ids but ``allowed`` are banned (a row with none allows all), ``banned`` are, ``bias`` is added
    to its ids' logits; then those of ``seen`` (values: how often) get their row's ``penalties`` [S, 3] float32.

    Penalties are repetition, which divides positive logits and multiplies others, frequency, subtracted as often as the
    token was seen, and presence, subtracted if it was.
    """

    allowed: RowIds
    banned: RowIds
    bias: RowIds
    seen: RowIds
    penalties: torch.Tensor
