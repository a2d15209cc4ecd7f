"""Sequences whose output is held to a grammar: what they may sample in a step, and the runs of tokens they are given.

Where a grammar leaves one way to go on, the tokens of that way are known before they are computed. The scheduler plans
them as one chunk, as those of a prompt, instead of one token a step: the row is released and comes back in the same
plan with its table, as a new row that computes the run and samples behind it. The first token of a run may be in
flight by then; a mask that allows nothing else makes sure of it.
"""

from __future__ import annotations

import numpy as np

from services.scheduler.decodes import Decodes
from services.scheduler.ends import Ends
from services.scheduler.flight import Flight
from services.scheduler.limits import Limits
from services.scheduler.request import Sequence
from services.scheduler.running import Running
from services.scheduler.steps import Draft, Step
from services.scheduler.tables import Tables
from shared.codec import Int32, int32, no_ids
from shared.grammar import GrammarError

SHORTEST_RUN = 2  # tokens: one is what a decoding row computes anyway
NOTHING_LEFT = "the grammar and the other rules of the request together leave no token to sample"


class Constrained:
    def __init__(
        self, limits: Limits, tables: Tables, running: Running, decodes: Decodes, flight: Flight, ends: Ends
    ) -> None:
        self._limits = limits
        self._tables = tables
        self._rows = running.rows
        self._decodes = decodes
        self._flight = flight
        self._ends = ends
        self._words = -(-limits.vocab_size // 32)
        self._not_eos = ~_bits(sorted(limits.eos_ids), self._words)

    # ---- masks -----------------------------------------------------------------------------------------------------

    def masked(self, slots: Int32) -> dict[Sequence, tuple[int, int]]:
        """Of a step that samples into ``slots``: who does so under a mask, the slot, and the token's position."""
        rows = self._rows
        return {rows.occupant(slot): (slot, int(rows.length[slot])) for slot in slots[rows.masked[slots]].tolist()}

    def mask(self, step: Step) -> tuple[list[int], Int32]:
        """Slots and bits of a MASK: of all who sample under one in a step, the oldest in flight, and are not over.

        Only now is all known that comes before what they sample. Who cannot go on ends here.
        """
        slots: list[int] = []
        bits: list[Int32] = []
        for sequence, (slot, position) in step.masked.items():
            if sequence.finished is None and (allowed := self._allowed(step, sequence, position)) is not None:
                slots.append(slot)
                bits.append(allowed)
        return slots, np.concatenate(bits) if bits else no_ids()

    def _allowed(self, step: Step, sequence: Sequence, position: int) -> Int32 | None:
        """What the token at ``position`` may be; None: nothing may follow, so it has ended or does so soon."""
        grammar = sequence.grammar
        assert grammar is not None
        place = position - sequence.num_tokens
        if place < len(grammar.forced):
            return _bits([grammar.forced[place]], self._words)
        try:
            bits = np.frombuffer(grammar.allowed(), dtype="<i4", count=self._words)
        except GrammarError as error:
            self._ends.break_off(sequence, f"the grammar cannot be followed any further: {error}")
            return None
        goes_on = bits & self._not_eos
        if goes_on.any():
            return goes_on if sequence.request.sampling.ignore_eos else bits
        if not bits.any() and not grammar.is_over:
            self._ends.break_off(sequence, "the grammar allows no token of this model here")
        elif place and sequence.request.tells_logprobs:  # the step computes those of the run before it
            step.completes.add(sequence)
        else:
            self._complete(sequence)
        return None

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def settle(self, step: Step) -> int:
        """A step has computed runs: their tokens are output now. Returns how many those are."""
        settled = 0
        for sequence, (_, position) in step.masked.items():
            if sequence.finished is None:
                settled += self._append_forced(sequence, position - sequence.num_tokens)
                if sequence in step.completes and sequence.finished is None:
                    self._ends.complete(sequence)
        return settled

    def deliver(self, sequence: Sequence, token: int) -> int:
        """A token was sampled (-1: there was none to sample). Returns by how many the output has grown."""
        if token < 0:
            self._ends.break_off(sequence, NOTHING_LEFT)
            return 0
        del sequence.ahead_logprobs[:1]  # it has that of the token that was sampled
        return self._append(sequence, token) + self.end_if_over(sequence)

    def end_if_over(self, sequence: Sequence) -> int:
        """Ends a sequence that can only go on in one way, or in none, until its grammar is complete.

        Returns by how many tokens its output grows.
        """
        grammar = sequence.grammar
        if sequence.finished is not None or grammar is None or not grammar.is_over:
            return 0
        if grammar.forced and (sequence.request.tells_logprobs or len(sequence.given) < len(grammar.forced)):
            return 0
        return self._complete(sequence)

    def _complete(self, sequence: Sequence) -> int:
        grammar = sequence.grammar
        assert grammar is not None
        appended = self._append_forced(sequence, len(grammar.forced))
        if sequence.finished is None:
            if grammar.forced:  # it was submitted with all the tokens that it may have
                self._ends.end_if_over(sequence)
            else:
                self._ends.complete(sequence)
        return appended

    def _append_forced(self, sequence: Sequence, count: int) -> int:
        """The next ``count`` forced tokens are output, as far as nothing ends it before. Returns how many are."""
        grammar = sequence.grammar
        assert grammar is not None
        tokens = grammar.forced[: min(count, sequence.request.max_tokens - len(sequence.output))]
        for appended, token in enumerate(tokens):
            if sequence.finished is not None:
                return appended
            if sequence.request.tells_logprobs:
                sequence.learn(sequence.ahead_logprobs.pop(0))
            self._append(sequence, token)
        return len(tokens)

    def _append(self, sequence: Sequence, token: int) -> int:
        request, grammar = sequence.request, sequence.grammar
        assert grammar is not None
        self._ends.append(sequence, token)
        if token in request.stop_ids:
            self._ends.end_if_over(sequence)
            return 1
        try:
            grammar.take(token)
        except GrammarError as error:
            self._ends.break_off(sequence, f"the grammar cannot be followed any further: {error}")
            return 1
        if grammar.is_over and not grammar.forced:
            self._ends.complete(sequence)
        else:
            self._ends.end_if_over(sequence)
        return 1

    # ---- runs ------------------------------------------------------------------------------------------------------

    def leave_for_runs(self) -> list[Sequence]:
        """Decoding rows that have a run before them decode no more, nor pause; ``plan_runs`` has to follow for them."""
        rows, leaving = self._rows, []
        for slot in np.flatnonzero(rows.masked & rows.decoding).tolist():
            sequence = rows.occupant(slot)
            if sequence.num_tokens + len(sequence.ahead) - int(rows.length[slot]) >= SHORTEST_RUN:
                rows.decoding[slot] = rows.paused[slot] = False
                leaving.append(sequence)
        return leaving

    def plan_runs(self, draft: Draft, sequences: list[Sequence], budget: int) -> int:
        """Plans as much of each run as there are blocks, and ``budget`` tokens for all; returns how many that are.

        Each gets one token at least: it has given up decoding one.
        """
        for sequence in sequences:
            self._decodes.make_room_for_next(draft, sequence)
        planned = 0
        for left, sequence in zip(range(len(sequences) - 1, -1, -1), sequences, strict=True):
            planned += self._plan_run(draft, sequence, max(1, budget - planned - left))
        return planned

    def _plan_run(self, draft: Draft, sequence: Sequence, most: int) -> int:
        """Plans at most this many tokens of a run; returns how many."""
        rows, tables, slot = self._rows, self._tables, sequence.slot
        length, last_length = int(rows.length[slot]), int(rows.last_length[slot])
        room = (len(sequence.blocks) + tables.pool.num_available) * tables.block_size - length
        tokens = np.concatenate([sequence.request.prompt, int32([*sequence.output, *sequence.ahead])])
        sequence.feed = tokens[: length + min(most, room)]
        end = len(sequence.feed)
        missing = self._limits.blocks_for(end) - len(sequence.blocks)
        if missing > 0:
            tables.grow(sequence, missing, "output")
        rows.vacate(slot)
        sequence.slot = rows.occupy(sequence)
        draft.new_row(sequence, rows.generations[sequence.slot], length)
        draft.table(sequence.slot, sequence.blocks)
        draft.chunk(sequence, length, sequence.feed[length:], [sequence])
        rows.start_decoding(sequence.slot, end, last_length)
        rows.capacity[sequence.slot] = len(sequence.blocks) * tables.block_size
        sequence.fence = self._flight.next_step
        return end - length


def _bits(tokens: list[int], words: int) -> Int32:
    """``words`` words in which the bits of ``tokens`` are set."""
    bits = np.zeros(words, dtype=np.uint32)
    ids = np.asarray(tokens, dtype=np.int64)
    np.bitwise_or.at(bits, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return bits.view("<i4")
