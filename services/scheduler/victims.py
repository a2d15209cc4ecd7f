"""Taking memory from some of those who run, so that the others can go on."""

from __future__ import annotations

from collections.abc import Mapping

from services.scheduler.decodes import Decodes
from services.scheduler.flight import Flight
from services.scheduler.preemption import Preemption
from services.scheduler.queues import Queues
from services.scheduler.request import Sequence
from services.scheduler.running import Running
from services.scheduler.stats import Stats
from services.scheduler.steps import Draft, Step
from services.scheduler.swaps import Swaps
from services.scheduler.tables import Tables


class Victims:
    """Carries out what ``preemption`` decides."""

    def __init__(
        self,
        preemption: Preemption,
        tables: Tables,
        running: Running,
        decodes: Decodes,
        queues: Queues,
        swaps: Swaps,
        flight: Flight,
        stats: Stats,
    ) -> None:
        self._preemption = preemption
        self._tables = tables
        self._running = running
        self._decodes = decodes
        self._queues = queues
        self._swaps = swaps
        self._flight = flight
        self._stats = stats

    def make_room(self) -> bool:
        """Whether every decoding row and beam can get the block its next token needs, preempting others for it.

        False: blocks are on their way back from steps in flight, which is cheaper to wait for than another victim.
        """
        while self._decodes.blocks_needed() > self._tables.pool.num_available:
            if self._swaps.leaving or self._flight.gives_back:
                return False
            self._preempt_group()
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's memory, never its tokens: one in flight still counts when it arrives."""
        self._queues.leave(sequence)
        self._running.vacate(sequence)
        self._queues.come_back(sequence)
        sequence.offer = None
        sequence.preemptions += 1
        self._stats.preempted()

    def swap_out(self, draft: Draft, sequences: list[Sequence]) -> None:
        """Plans the copies to the host for ``sequences``, which no step in flight writes to any more."""
        draft.swapped, draft.swap_out = sequences, self._swaps.take_out(sequences)
        for sequence in sequences:
            sequence.fence = self._flight.next_step
        for decision in {id(one): one for sequence in sequences if (one := sequence.preempted_by)}.values():
            draft.efforts.append((decision, "swap_out", decision.blocks))

    def measure(self, step: Step, timings: Mapping[str, float]) -> None:
        """What a step took: for the costs to predict from, and for the preemptions that it carried out."""
        amounts = {"forward": step.tokens, **step.moved}
        self._preemption.costs.observe(timings, amounts, prompt_tokens=step.prompt_tokens)
        for decision, part, amount in step.efforts:
            decision.measured += timings.get(part, 0.0) * amount / max(amounts.get(part, 0), 1)

    def _preempt_group(self) -> None:
        """The next victims lose their memory, or take it to the host."""
        group = self._preemption.victims(self._running.sequences())
        for sequence in group:
            sequence.cached = self._running.stored(sequence)
        decision = self._preemption.decide(
            group, self._tables.block_size, self._flight.next_step, self._swaps.host.num_free
        )
        self._stats.group_preempted(decision.mode)
        if decision.mode == "swap":
            self._swaps.start(group)
        for sequence in group:
            self.preempt(sequence)
