"""Steps: a plan while it is drafted, and what the scheduler remembers of it until its result is retired."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.scheduler.preemption import Decision
from services.scheduler.request import Request, Sequence
from services.scheduler.rows import Slots
from shared.codec import Int32, int32, no_ids
from shared.sampling import LogitRules
from shared.wire import NewRow, Plan, RowRules, Run

Effort = tuple[Decision, str, int]
"""A preemption, a part of the timings of a step that is its doing, and the share of that in blocks or tokens."""


class Chunk(NamedTuple):
    """A sequence's chunk, its end, and the positions of the tokens of a run that its result tells of."""

    sequence: Sequence
    end: int
    run: range


@dataclass(slots=True)
class Step:
    """A plan in flight. Result i belongs to ``slots[i]``, that is to ``sequences[i]``."""

    step_id: int
    slots: Int32
    sequences: list[Sequence]
    lengths: Slots  # of the decode rows, which come first: tokens whose KV is stored when the step has run
    chunks: list[Chunk]  # those of the plan, in its order
    decodes: int  # rows with one token each, beams included
    prompt_tokens: int  # in chunks of prompts,
    contexts: float  # and the tokens before each of these, in sum
    pins: list[int]  # blocks the step copies from, which it holds itself
    sent: float
    moved: dict[str, int] = field(default_factory=dict)  # blocks swapped, by the timing's name
    efforts: list[Effort] = field(default_factory=list)  # what of it preemptions cost
    host: list[int] = field(default_factory=list)  # host blocks that this is the last step to name
    vacated: list[Sequence] = field(default_factory=list)  # ended or preempted since; the last to name their blocks
    masked: dict[Sequence, tuple[int, int]] = field(default_factory=dict)  # who samples under a mask: (slot, position)
    mask_sent: bool = False  # whether the workers have the masks
    completes: set[Sequence] = field(default_factory=set)  # who samples nothing in it, and ends once its run is told

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    @property
    def gives_back(self) -> bool:
        """Whether its retire may make blocks available."""
        return bool(self.vacated or self.pins)


class Draft:
    """The changes of one step, in the columns of ``Plan``."""

    def __init__(self) -> None:
        self.sampled: list[Sequence] = []  # sequences that a final chunk of this step samples into
        self.chunks: list[Chunk] = []
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
        self.swap_out: list[tuple[int, int]] = []  # (block, host block)
        self.swap_in: list[tuple[int, int]] = []  # (host block, block)
        self.beams: list[Sequence] = []  # whose rows are for this step alone
        self.swapped: list[Sequence] = []  # whose blocks are swapped out
        self.efforts: list[Effort] = []
        self.host: list[int] = []  # host blocks that are of no use after this step
        self.pause: list[int] = []
        self.resume: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether, decode rows apart, there is nothing to do."""
        return not (self._chunk_slots or self.swap_out)

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
                logprobs=_wanted_logprobs(sequence.request),
                rules=_row_rules(sequence),
                masked=sequence.grammar is not None,
                run=_run(sequence),
                ranked=sequence.request.sampling.is_held,
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
        end, run = start + len(ids), _run(sequence)
        told = range(max(start + 1, run.start), min(end + 1, run.start + len(run.tokens))) if run else range(0)
        self.chunks.append(Chunk(sequence, end, told))
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
            pause=self.pause,
            resume=self.resume,
            release=release,
            tokens=np.concatenate(self._tokens) if self._tokens else no_ids(),
            table_blocks=int32(self._table_blocks),
            append_slots=int32(self._append_slots),
            append_blocks=int32(self._append_blocks),
            swap_out=int32([number for pair in self.swap_out for number in pair]),
            swap_in=int32([number for pair in self.swap_in for number in pair]),
            copies=int32(self._copies),
        )


def _wanted_logprobs(request: Request) -> int:
    """As in ``NewRow``: what the scheduler itself needs."""
    if request.search is not None:
        return request.search.candidates
    return max(0, request.sampling.logprobs) if request.sampling.is_held else request.sampling.logprobs


def _run(sequence: Sequence) -> Run | None:
    """What of its feed is output that is not sampled, where logprobs of that are needed."""
    first = sequence.num_tokens
    if sequence.grammar is None or not sequence.request.tells_logprobs or len(sequence.feed) <= first:
        return None
    return Run(first, sequence.feed[first:].tolist())


def _row_rules(sequence: Sequence) -> RowRules | None:
    """As in ``NewRow``. Its feed is all that the row has: who enters with a token in flight knows which one it is."""
    request = sequence.request
    rules, prompt_logprobs = request.sampling.rules, request.missing_prompt_logprobs
    logprob_ids = request.sampling.logprob_token_ids
    if rules is None and prompt_logprobs < 0 and not logprob_ids:
        return None
    rules = rules or LogitRules()
    looked_at = rules.has_penalties or prompt_logprobs >= 0 or any(len(word) > 1 for word in rules.bad_words)
    return RowRules(
        prompt_tokens=len(request.prompt),
        tokens=sequence.feed.tolist() if looked_at else [],
        stop_ids=sorted(request.stop_ids) if rules.min_tokens else [],
        rules=rules,
        prompt_logprobs=prompt_logprobs,
        logprob_ids=logprob_ids,
    )
