"""Masks of single rows on their logits: what a grammar does not allow is not sampled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from services.worker.executor import PlanError
from services.worker.logit_rules import BANNED, Upload
from services.worker.rows import Ints
from shared.wire import Mask


class Masks:
    """Eight tokens at a time: a mask's octets are looked up in a table of what to add to their logits, 0 or -inf.

    So a step of masked rows costs one look-up and one addition over their logits, without a branch for each token.
    """

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._tables: dict[torch.dtype, torch.Tensor] = {}  # [256, 8] by the logits' dtype

    def apply(self, logits: torch.Tensor, mask: Mask, slots: Ints, masked: npt.NDArray[np.bool_]) -> Ints:
        """Bans in ``logits [S, V]``, of ``slots``, what ``mask`` does not allow. Returns the rows it is about.

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
        octets = self._upload(np.frombuffer(mask.bits, dtype=np.uint8).reshape(rows, -1).astype(np.int32))
        added = torch.nn.functional.embedding(octets, self._table(logits.dtype)).view(rows, -1)[:, :vocab_size]
        if np.array_equal(held, np.arange(len(logits))):
            logits += added
        else:
            logits[self._upload(held)] += added
        return held

    def fill_empty(self, logits: torch.Tensor, rows: Ints) -> torch.Tensor:
        """Which of ``rows`` have nothing left to sample, [R] bool; they get everything, so that sampling is defined."""
        chosen = self._upload(rows)
        left = logits[chosen]
        empty = left.amax(dim=-1) == BANNED
        logits[chosen] = left.masked_fill(empty.unsqueeze(-1), 0.0)
        return empty

    def _table(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._tables:
            allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            added = np.where(allowed == 1, np.float32(0.0), np.float32(BANNED))
            self._tables[dtype] = self._upload(added).to(dtype)
        return self._tables[dtype]
