"""Where sequences are that do not decode yet: waiting, preempted, or with a prompt under way."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from services.scheduler.limits import Limits
from services.scheduler.request import Sequence, State
from services.scheduler.waiting import WaitingQueue


class Queues:
    """waiting: never admitted yet. preempted: in the order they come back. prefilling: in the order of admission."""

    def __init__(self, limits: Limits) -> None:
        self.waiting = WaitingQueue(limits.scheduling_policy, limits.tenant_weights)
        self.preempted: list[Sequence] = []
        self.prefilling: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.preempted)

    def all_waiting(self) -> Iterator[Sequence]:
        """Everybody who waits for a slot: the preempted, then those never admitted, siblings one after another."""
        yield from self.preempted
        for leader in self.waiting:
            yield leader
            yield from leader.forks

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue that its state says it is in, if any."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.PREEMPTED:
            self.preempted.remove(sequence)
        elif sequence.state is State.PREFILL:
            self.prefilling.remove(sequence)

    def come_back(self, sequence: Sequence) -> None:
        """A sequence that is in no queue is preempted from now on."""
        sequence.state = State.PREEMPTED
        insort(self.preempted, sequence, key=_return_key)

    def hand_over_forks(self, sequence: Sequence) -> None:
        """A sequence ends; siblings that were to sample from its prompt's last position still want to."""
        if sequence.state is State.FORK:
            leader = sequence.leader
            if leader.state is State.WAITING:
                self.waiting.drop_fork(leader, sequence)
            else:
                leader.forks.remove(sequence)
        elif sequence.forks:
            heir, *heir.forks = sequence.forks
            sequence.forks = []
            heir.state = State.WAITING
            self.waiting.add(heir)


def _return_key(sequence: Sequence) -> tuple[int, int, int]:
    return (sequence.request.priority, sequence.request.order, sequence.index)
