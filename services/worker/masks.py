"""Masks of single rows on their logits: what a grammar does not allow is not sampled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from services.worker.executor import PlanError
from services.worker.logit_rules import BANNED, Upload
from services.worker.rows import Ints
from shared.wire import Mask


def apply(logits: torch.Tensor, mask: Mask, slots: Ints, masked: npt.NDArray[np.bool_], upload: Upload) -> Ints:
    """Bans in ``logits [S, V]``, which belong to ``slots``, what ``mask`` does not allow. Returns the rows it is about.

    masked: bool[max_num_seqs], who may have one. Raises PlanError when the mask is about others.
    """
    places = {slot: place for place, slot in enumerate(slots.tolist()) if masked[slot]}
    if not places.keys() >= set(mask.slots) or len(set(mask.slots)) != len(mask.slots):
        raise PlanError(f"a mask for slots {mask.slots}, but those that sample under one are {list(places)}")
    rows, vocab_size = len(mask.slots), logits.shape[1]
    if len(mask.bits) != rows * -(-vocab_size // 32):
        raise PlanError(f"{len(mask.bits)} words of mask for {rows} rows of {vocab_size} tokens")
    held = np.asarray([places[slot] for slot in mask.slots], dtype=np.int64)
    if not rows:
        return held
    octets = upload(np.frombuffer(mask.bits, dtype=np.uint8).reshape(rows, -1).copy())
    bits = octets.unsqueeze(-1) & upload(np.left_shift(1, np.arange(8)).astype(np.uint8))
    banned = (bits == 0).view(rows, -1)[:, :vocab_size]
    if np.array_equal(held, np.arange(len(logits))):
        logits.masked_fill_(banned, BANNED)
    else:
        chosen = upload(held)
        logits[chosen] = logits[chosen].masked_fill(banned, BANNED)
    return held


def fill_empty(logits: torch.Tensor, rows: Ints, upload: Upload) -> torch.Tensor:
    """Which of ``rows`` have nothing left to sample, [R] bool; they get everything, so that sampling is defined."""
    chosen = upload(rows)
    left = logits[chosen]
    empty = left.amax(dim=-1) == BANNED
    logits[chosen] = left.masked_fill(empty.unsqueeze(-1), 0.0)
    return empty
