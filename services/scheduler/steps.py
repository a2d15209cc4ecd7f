"""Steps: a plan while it is drafted, and what the scheduler remembers of it until its result is retired."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.request import Sequence
from shared.codec import Int32, int32, no_ids
from shared.wire import NewRow, Plan


@dataclass(slots=True)
class Step:
    """A plan in flight. Result i belongs to ``slots[i]``, that is to ``sequences[i]``.

    reclaim: blocks that this is the last step to name, of sequences that have ended or were preempted since.
    tokens: how many this step computes.
    """

    step_id: int
    slots: Int32
    sequences: list[Sequence]
    tokens: int
    sent: float
    reclaim: list[int] = field(default_factory=list)


class Draft:
    """The changes of one step, in the columns of ``Plan``."""

    def __init__(self) -> None:
        self.sampled: list[Sequence] = []  # sequences whose final chunk is in this step
        self._new_rows: list[NewRow] = []
        self._chunk_slots: list[int] = []
        self._chunk_starts: list[int] = []
        self._chunk_lens: list[int] = []
        self._chunk_samples: list[list[int]] = []
        self._table_slots: list[int] = []
        self._table_lens: list[int] = []
        self._table_blocks: list[int] = []
        self._append_slots: list[int] = []
        self._append_blocks: list[int] = []
        self._tokens: list[Int32] = []

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunk_slots)

    def new_row(self, sequence: Sequence, generation: int) -> None:
        sampling = sequence.request.sampling
        self._new_rows.append(
            NewRow(
                slot=sequence.slot,
                generation=generation,
                length=0,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=sampling.seed + sequence.index,
            )
        )

    def table(self, slot: int, blocks: Many[int]) -> None:
        self._table_slots.append(slot)
        self._table_lens.append(len(blocks))
        self._table_blocks.extend(blocks)

    def append(self, slot: int, block: int) -> None:
        self._append_slots.append(slot)
        self._append_blocks.append(block)

    def chunk(self, sequence: Sequence, start: int, ids: Int32, *, final: bool) -> None:
        self._chunk_slots.append(sequence.slot)
        self._chunk_starts.append(start)
        self._chunk_lens.append(len(ids))
        self._chunk_samples.append([sequence.slot] if final else [])
        self._tokens.append(ids)
        if final:
            self.sampled.append(sequence)

    def plan(
        self, step_id: int, scheduler_epoch: int, worker_epoch: int, *, full: bool, decodes: int, release: list[int]
    ) -> Plan:
        return Plan(
            step_id=step_id,
            scheduler_epoch=scheduler_epoch,
            worker_epoch=worker_epoch,
            full=full,
            decodes=decodes,
            new_rows=self._new_rows,
            chunk_slots=self._chunk_slots,
            chunk_starts=self._chunk_starts,
            chunk_lens=self._chunk_lens,
            chunk_samples=self._chunk_samples,
            table_slots=self._table_slots,
            table_lens=self._table_lens,
            pause=[],
            resume=[],
            release=release,
            tokens=np.concatenate(self._tokens) if self._tokens else no_ids(),
            table_blocks=int32(self._table_blocks),
            append_slots=int32(self._append_slots),
            append_blocks=int32(self._append_blocks),
            swap_out=no_ids(),
            swap_in=no_ids(),
            copies=no_ids(),
        )
