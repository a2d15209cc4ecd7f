"""Who gets a free slot, with what the prefix cache or the host has of it; and why the others wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from services.scheduler.budget import Budget
from services.scheduler.flight import Flight
from services.scheduler.preemption import Costs
from services.scheduler.prefill import Prefill
from services.scheduler.prefix_cache import Match
from services.scheduler.queues import Queues
from services.scheduler.request import Sequence, State
from services.scheduler.running import Running
from services.scheduler.stats import Stats
from services.scheduler.steps import Draft
from services.scheduler.swaps import Swaps
from services.scheduler.tables import NOTHING, Tables
from shared.codec import int32

LOOK_UP_AGAIN = 8  # plans after which a prompt that did not fit is looked up again: it may have more hits by now
AWAIT_STEPS = 256  # plans in which a sequence waits for another to compute the next block that they share, at most
SPARE = 200  # one block in this many is kept for those already running


class Admission:
    def __init__(
        self,
        tables: Tables,
        running: Running,
        queues: Queues,
        prefill: Prefill,
        swaps: Swaps,
        flight: Flight,
        costs: Costs,
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._tables = tables
        self._running = running
        self._queues = queues
        self._prefill = prefill
        self._swaps = swaps
        self._flight = flight
        self._costs = costs
        self._stats = stats
        self._clock = clock
        self._watermark = max(1, tables.pool.num_usable // SPARE)
        self._holdup = "turn"  # why the last plan admitted no more
        self._too_big: set[Sequence] = set()  # those it looked at that did not fit

    def admit(self, draft: Draft, budget: Budget) -> None:
        """Gives free slots to preempted, then to waiting sequences, in order.

        Only whole prompts are admitted, with blocks to spare for those already running, so that prompts that hold
        half of what they need never wait for one another. What a prompt under way has yet to take is kept for it;
        decodes may take it nevertheless, and then nobody else does before it is back.
        """
        queues, running = self._queues, self._running
        self._too_big.clear()
        while not budget.is_spent and running.num_free_rows > 0:
            if queues.preempted and queues.preempted[0].host:
                if not self._bring_back(draft, queues.preempted[0], budget) and queues.preempted[0].host:
                    break
                continue
            sequence = self._next(draft)
            if sequence is None:
                break
            if sequence.request.scheduled is None:
                self._note_first(sequence)
            elif sequence.preempted_by is not None:
                self._costs.came_back(len(sequence.feed), sequence.computed)
            self._prefill.enter(draft, sequence, budget)
        self._holdup = self._why_no_more(budget)

    def waits_for(self, sequence: Sequence) -> str:
        """Why a sequence has no slot.

        preempted, prefix (somebody is computing what it shares with them), slots, budget (tokens of a step), memory, or
        turn (others go first).
        """
        if sequence.state is State.PREEMPTED:
            return "preempted"
        if sequence.state is State.FORK:
            sequence = sequence.leader
        if sequence.awaits:
            return "prefix"
        if self._holdup != "turn":
            return self._holdup
        return "memory" if sequence in self._too_big else "turn"

    def waiting_by_reason(self) -> dict[str, int]:
        return Counter(map(self.waits_for, self._queues.all_waiting()))

    @property
    def _slack(self) -> int:
        """Blocks that an admission leaves available."""
        return self._prefill.blocks_missing + (self._watermark if self._running.rows.num_used else 0)

    def _why_no_more(self, budget: Budget) -> str:
        """What ended the admissions of a plan with ``budget`` left; turn: nothing but who was next."""
        if budget.is_spent:
            return "budget"
        return "turn" if self._running.num_free_rows > 0 else "slots"

    def _note_first(self, sequence: Sequence) -> None:
        """A request is admitted for the first time."""
        request, shares = sequence.request, self._queues.waiting.shares
        request.scheduled = self._clock()
        self._stats.scheduled(request, request.scheduled)
        if shares is not None:
            shares.serve(request.tenant, prompt_tokens=len(request.prompt))
        request.cached_tokens = min(sequence.computed, len(request.prompt))
        self._stats.looked_up(len(sequence.feed), sequence.computed)

    def _next(self, draft: Draft) -> Sequence | None:
        """Preempted sequences in order, then who waits; smaller ones pass the first, boundedly, if it has no room."""
        if self._queues.preempted:
            first = self._queues.preempted[0]  # its last token may still be on its way
            return first if not self._flight.has(first.fence) and self._place(first, draft) else None
        for sequence in self._queues.waiting.candidates():
            if self._place(sequence, draft):
                for passed in self._too_big:
                    passed.passes += 1
                return sequence
            if not sequence.awaits:
                self._too_big.add(sequence)
        return None

    def _place(self, sequence: Sequence, draft: Draft) -> bool:
        """Gives a sequence that waits the blocks that are cached for it, if there is room for all that it still needs.

        It waits instead while somebody else computes the next block of its prompt, for AWAIT_STEPS at most.
        """
        if self._running.num_free_rows < self._running.rows_needed(sequence):
            return False
        step_id, slack = self._flight.next_step, self._slack
        patient = not sequence.awaits or step_id - sequence.awaits < AWAIT_STEPS
        if sequence.awaits and patient and self._tables.is_key_being_written(sequence):
            return False
        if self._is_known_not_to_fit(sequence):
            return False
        _feed(sequence)
        # What tells the logprobs of a prompt computes all of it.
        look_up = sequence.request.missing_prompt_logprobs < 0
        match = self._tables.look_up(sequence) if look_up else NOTHING
        before = sequence.awaited
        if look_up and patient and self._tables.is_being_written(sequence, match):
            if not sequence.awaits or sequence.awaited != before:
                sequence.awaits = step_id
            return False
        match = self._short_of_run(sequence, match)
        adopted = self._tables.adopt(sequence, match, slack=slack, step_id=step_id)
        if adopted is None:
            return False
        sequence.cached, source = adopted
        sequence.computed = min(sequence.cached, len(sequence.feed) - 1)
        sequence.awaits = 0
        if source:
            draft.copy(source, sequence.blocks[-1])
            self._stats.copied("prefix")
        return True

    def _short_of_run(self, sequence: Sequence, match: Match) -> Match:
        """``match`` up to the first position whose logits tell a logprob that is needed of what is ahead."""
        size, most = self._tables.block_size, sequence.told_ahead - 1
        if most >= len(sequence.feed) - 1 or len(match.entries) * size + match.inside <= most:
            return match
        return Match(match.entries[: most // size])

    def _is_known_not_to_fit(self, sequence: Sequence) -> bool:
        """Whether it lacked more blocks than there are now, and need not be looked up again in this plan."""
        later = self._flight.steps and self._flight.next_step % LOOK_UP_AGAIN
        return bool(later) and sequence.missing > self._tables.pool.num_available - self._slack

    def _bring_back(self, draft: Draft, first: Sequence, budget: Budget) -> bool:
        """Admits the swapped group of ``first``, each of which computes one token; all of it or nothing (False)."""
        group = [one for one in self._queues.preempted if one.host and one.request is first.request]
        rows = sum(1 + len(sequence.forks) for sequence in group)
        free = min(self._running.num_free_rows, budget.tokens)
        if rows > free or any(self._flight.has(sequence.fence) for sequence in group):
            return False
        if self._is_known_not_to_fit(first):
            return False
        for sequence in group:
            _feed(sequence)
        moves = self._swaps.bring_back(group, slack=self._slack)
        if moves is None:
            if not self._tables.pool.num_used:  # it never fits as a whole, but its sequences do one after another
                for sequence in group:
                    self._swaps.forget(sequence)
            return False
        draft.swap_in += moves
        if first.preempted_by is not None:
            draft.efforts.append((first.preempted_by, "swap_in", len(moves)))
        for sequence in group:
            draft.host += sequence.host
            sequence.host = []
            sequence.computed = min(sequence.cached, len(sequence.feed) - 1)
            self._prefill.enter(draft, sequence, budget)
        return True


def _feed(sequence: Sequence) -> None:
    """What is to be computed of a sequence: its prompt, all of its output, and what follows that in any case."""
    ahead = sequence.ahead
    if len(sequence.feed) != sequence.num_tokens + len(ahead):
        sequence.feed = np.concatenate([sequence.request.prompt, int32([*sequence.output, *ahead])])
