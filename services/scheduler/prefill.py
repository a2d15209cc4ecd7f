"""Prompts under way: chunk by chunk until their sequences decode."""

from __future__ import annotations

from services.scheduler.budget import Budget
from services.scheduler.flight import Flight
from services.scheduler.limits import Limits
from services.scheduler.queues import Queues
from services.scheduler.request import Sequence, State
from services.scheduler.running import Running
from services.scheduler.steps import Draft
from services.scheduler.tables import Tables


class Prefill:
    def __init__(self, limits: Limits, tables: Tables, running: Running, queues: Queues, flight: Flight) -> None:
        self._limits = limits
        self._tables = tables
        self._rows = running.rows
        self._beams = running.beams
        self._queues = queues
        self._flight = flight

    @property
    def blocks_missing(self) -> int:
        """Blocks that prompts under way have yet to take. They were there at admission, and are kept for them."""
        blocks_for = self._limits.blocks_for
        return sum(blocks_for(len(one.feed)) - len(one.blocks) for one in self._queues.prefilling)

    def enter(self, draft: Draft, sequence: Sequence, budget: Budget) -> None:
        """Gives a sequence that has its table a slot, and plans its first chunk."""
        self._queues.leave(sequence)
        sequence.state = State.PREFILL
        sequence.slot = self._rows.occupy(sequence)
        sequence.fence = self._flight.next_step
        self._queues.prefilling.append(sequence)
        if sequence.request.search is not None:
            self._beams.requests[sequence.request] = None
        draft.new_row(sequence, self._rows.generations[sequence.slot], sequence.cached)
        self._compute(draft, sequence, budget, new=True)

    def go_on(self, draft: Draft, budget: Budget) -> None:
        """Plans the next chunk of each prompt under way."""
        for sequence in list(self._queues.prefilling):
            self._compute(draft, sequence, budget)

    def _compute(self, draft: Draft, sequence: Sequence, budget: Budget, *, new: bool = False) -> None:
        """Plans the next chunk of a prompt, as far as budget and free blocks go."""
        size, start, total = self._limits.block_size, sequence.computed, len(sequence.feed)
        room = (len(sequence.blocks) + self._tables.pool.num_available) * size - start
        count = budget.chunk(start, min(room, total - start))
        if count <= 0:
            if new:
                draft.table(sequence.slot, sequence.blocks)
            return
        budget.spend(start, count)
        end = start + count
        missing = self._limits.blocks_for(end) - len(sequence.blocks)
        if missing > 0:
            self._tables.grow(sequence, missing, "prompt")
        if missing > 0 or new:
            draft.table(sequence.slot, sequence.blocks)
        sequence.computed = end
        sequence.fence = self._flight.next_step
        if sequence.preempted_by is not None:
            draft.efforts.append((sequence.preempted_by, "forward", count))
        if end == total:
            self._queues.prefilling.remove(sequence)
            samples = self._start_decoding(draft, sequence, start)
        else:
            samples = []
        draft.chunk(sequence, start, sequence.feed[start:end], samples)

    def _start_decoding(self, draft: Draft, leader: Sequence, start: int) -> list[Sequence]:
        """The sequences that sample from the last position of a prompt, whose last chunk begins at ``start``.

        The forks of ``leader`` enter with rows of their own, and share all of its blocks.
        """
        request, total, rows = leader.request, len(leader.feed), self._rows
        if request.search is not None:
            leader.state, leader.preempted_by = State.BEAM, None
            draft.beams.append(leader)
            return [leader]
        group = [leader, *leader.forks]
        for sequence in leader.forks:
            self._tables.fork(leader, sequence)
            sequence.slot = rows.occupy(sequence)
            sequence.fence, sequence.feed = leader.fence, leader.feed
            draft.new_row(sequence, rows.generations[sequence.slot], max(start, leader.cached))
            draft.table(sequence.slot, sequence.blocks)
        leader.forks = []
        for sequence in group:
            sequence.state = State.DECODE
            sequence.preempted_by = None
            rows.capacity[sequence.slot] = len(sequence.blocks) * self._limits.block_size
            rows.start_decoding(sequence.slot, total, len(request.prompt) + request.max_tokens - 1)
            rows.forked[sequence.slot] = len(group) > 1
        return group
