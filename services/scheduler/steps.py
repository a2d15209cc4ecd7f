"""Steps: a plan while it is drafted, and what the scheduler remembers of it until its result is retired."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.request import Sequence
from services.scheduler.rows import Slots
from shared.codec import Int32, int32, no_ids
from shared.wire import NewRow, Plan


@dataclass(slots=True)
class Step:
    """A plan in flight. Result i belongs to ``slots[i]``, that is to ``sequences[i]``.

    lengths: of the decode rows, which come first: tokens whose KV is stored when the step has run. chunks: sequences
    that had a chunk, and the same of them. pins: blocks the step copies from, which it holds itself. vacated: sequences
    that have ended or were preempted since, whose blocks this is the last step to name. tokens: how many it computes.
    """

    step_id: int
    slots: Int32
    sequences: list[Sequence]
    lengths: Slots
    chunks: list[tuple[Sequence, int]]
    pins: list[int]
    tokens: int
    sent: float
    vacated: list[Sequence] = field(default_factory=list)

    @property
    def gives_back(self) -> bool:
        """Whether its retire may make blocks available."""
        return bool(self.vacated or self.pins)


class Draft:
    """The changes of one step, in the columns of ``Plan``."""

    def __init__(self) -> None:
        self.sampled: list[Sequence] = []  # sequences that a final chunk of this step samples into
        self.chunks: list[tuple[Sequence, int]] = []
        self.pins: list[int] = []  # sources of copies
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
        self._copies: list[int] = []

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunk_slots)

    def new_row(self, sequence: Sequence, generation: int, length: int) -> None:
        sampling = sequence.request.sampling
        self._new_rows.append(
            NewRow(
                slot=sequence.slot,
                generation=generation,
                length=length,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=(sampling.seed + sequence.index) % (1 << 63),
            )
        )

    def table(self, slot: int, blocks: Many[int]) -> None:
        self._table_slots.append(slot)
        self._table_lens.append(len(blocks))
        self._table_blocks.extend(blocks)

    def append(self, slot: int, block: int) -> None:
        self._append_slots.append(slot)
        self._append_blocks.append(block)

    def copy(self, source: int, destination: int) -> None:
        """Copies a block whose source is pinned for this step."""
        self._copies += (source, destination)
        self.pins.append(source)

    def chunk(self, sequence: Sequence, start: int, ids: Int32, samples: Many[Sequence]) -> None:
        """Computes ``ids`` at positions from ``start``, and samples into the slots of ``samples`` from the last one."""
        self._chunk_slots.append(sequence.slot)
        self._chunk_starts.append(start)
        self._chunk_lens.append(len(ids))
        self._chunk_samples.append([one.slot for one in samples])
        self._tokens.append(ids)
        self.chunks.append((sequence, start + len(ids)))
        self.sampled += samples

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
            copies=int32(self._copies),
        )
