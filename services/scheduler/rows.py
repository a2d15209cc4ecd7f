"""The worker's rows as the scheduler sees them: who has which slot, and how far each row is planned."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.scheduler.request import Sequence

Slots = npt.NDArray[np.int64]


class Rows:
    """Struct of arrays over slots, so that a step's decode rows cost no Python each.

    decoding: bool[slots], in every plan until vacated, unless paused. length: tokens whose KV is stored once all steps
    planned have run. capacity: tokens the block table holds. last_length: the length at which the last allowed token is
    sampled.
    forked: bool[slots], the row's last block may be another's too, which matters before it writes there.
    masked: bool[slots], the row samples under a mask.
    leaving: slots the next plan releases; they can be given to new rows of that very plan.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.decoding = np.zeros(max_num_seqs, dtype=np.bool_)
        self.length = np.zeros(max_num_seqs, dtype=np.int64)
        self.capacity = np.zeros(max_num_seqs, dtype=np.int64)
        self.last_length = np.zeros(max_num_seqs, dtype=np.int64)
        self.forked = np.zeros(max_num_seqs, dtype=np.bool_)
        self.paused = np.zeros(max_num_seqs, dtype=np.bool_)
        self.masked = np.zeros(max_num_seqs, dtype=np.bool_)
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self.generations = [0] * max_num_seqs
        self.leaving: list[int] = []
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self.sequences) - len(self._free)

    def occupants(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    def occupant(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def decode_slots(self) -> Slots:
        return np.flatnonzero(self.decoding & ~self.paused)

    def pause(self, slots: list[int]) -> tuple[list[int], list[int]]:
        """From now on exactly these decoding slots are paused. Returns which ones newly are, and which no more."""
        before, self.paused = self.paused, np.zeros_like(self.paused)
        self.paused[slots] = True
        return np.flatnonzero(self.paused & ~before).tolist(), np.flatnonzero(before & ~self.paused).tolist()

    def complete(self) -> list[int]:
        """Decoding slots whose last allowed token is planned."""
        return np.flatnonzero(self.decoding & (self.length >= self.last_length)).tolist()

    def needing_block(self) -> list[int]:
        """Decoding slots whose next token does not fit into their blocks."""
        return np.flatnonzero(self.decoding & (self.length >= self.capacity)).tolist()

    def writing_to_forked(self) -> list[int]:
        """Decoding slots whose next token goes into a block that may be shared."""
        return np.flatnonzero(self.decoding & self.forked & (self.length < self.capacity)).tolist()

    def occupy(self, sequence: Sequence) -> int:
        """Gives ``sequence`` a slot under a new generation."""
        slot = self._free.pop()
        self.generations[slot] += 1
        self.sequences[slot] = sequence
        self.masked[slot] = sequence.grammar is not None
        self.length[slot] = self.capacity[slot] = 0
        return slot

    def start_decoding(self, slot: int, length: int, last_length: int) -> None:
        self.decoding[slot] = True
        self.forked[slot] = False
        self.length[slot] = length
        self.last_length[slot] = last_length

    def vacate(self, slot: int) -> None:
        self.decoding[slot] = self.paused[slot] = self.masked[slot] = False
        self.sequences[slot] = None
        self.leaving.append(slot)
        self._free.append(slot)

    def take_leaving(self) -> list[int]:
        leaving, self.leaving = self.leaving, []
        return leaving
