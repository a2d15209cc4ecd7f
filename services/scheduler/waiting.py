"""Sequences that wait for their first admission, in the order of the scheduling policy. Keeps no time."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping

from services.scheduler.fair_shares import FairShares
from services.scheduler.request import Sequence

LOOKAHEAD = 16  # waiting sequences looked at in one step when the first does not fit
MAX_PASSES = 32  # smaller sequences that may pass one that does not fit, before memory is kept for it


class Lane:
    """Sequences by priority, and in the order of arrival within one. Any of them is taken out in O(1)."""

    def __init__(self) -> None:
        self._ranks: list[int] = []  # the priorities that somebody waits with, ascending
        self._queues: dict[int, OrderedDict[Sequence, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def __iter__(self) -> Iterator[Sequence]:
        for rank in self._ranks:
            yield from self._queues[rank]

    def add(self, sequence: Sequence) -> None:
        rank = sequence.request.priority
        if rank not in self._queues:
            self._queues[rank] = OrderedDict()
            insort(self._ranks, rank)
        self._queues[rank][sequence] = None

    def remove(self, sequence: Sequence) -> None:
        rank = sequence.request.priority
        queue = self._queues[rank]
        del queue[sequence]
        if not queue:
            del self._queues[rank]
            self._ranks.remove(rank)


class WaitingQueue:
    """fcfs and priority are one lane (under fcfs all priorities are equal); fair is a lane per tenant.

    Smaller sequences may pass one that does not fit; ``Sequence.passes`` counts how often, and ends it.
    """

    def __init__(self, policy: str, weights: Mapping[str, float] | None = None) -> None:
        self.shares = FairShares(weights or {}) if policy == "fair" else None
        self._lanes: dict[str, Lane] = {}
        self._size = 0
        self.tokens = 0  # of the prompts that wait

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """All, tenant after tenant under fair."""
        for tenant in self._order():
            yield from self._lanes[tenant]

    def add(self, sequence: Sequence) -> None:
        tenant = self._lane_of(sequence)
        if tenant not in self._lanes:
            if self.shares is not None:
                self.shares.arrive(tenant, self._lanes)
            self._lanes[tenant] = Lane()
        self._lanes[tenant].add(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        tenant = self._lane_of(sequence)
        lane = self._lanes[tenant]
        lane.remove(sequence)
        self._count(sequence, -1)
        if not lane:
            del self._lanes[tenant]
            if self.shares is not None and not self._lanes:
                self.shares.leave(tenant)

    def drop_fork(self, leader: Sequence, fork: Sequence) -> None:
        """A sibling of one that waits needs no place any more."""
        self._count(leader, -1)
        leader.forks.remove(fork)
        self._count(leader, 1)

    def candidates(self) -> Iterator[Sequence]:
        """Who may be admitted next, in order: the tenants' first ones, then their second ones, and so on.

        Ends after LOOKAHEAD, and after one that others have passed MAX_PASSES times. Not to be used on after a change.
        """
        lanes = deque(iter(self._lanes[tenant]) for tenant in self._order())
        for _ in range(LOOKAHEAD):
            sequence = None
            while lanes and (sequence := next(lanes[0], None)) is None:
                lanes.popleft()
            if sequence is None:
                return
            yield sequence
            if sequence.passes >= MAX_PASSES:
                return
            lanes.rotate(-1)

    def tenants(self) -> list[str]:
        """Tenants of whom something waits; ["" alone] unless the policy is fair."""
        return list(self._lanes)

    def _count(self, sequence: Sequence, sign: int) -> None:
        """A sequence that siblings wait for counts for all of them."""
        places = 1 + len(sequence.forks)
        self._size += sign * places
        self.tokens += sign * places * len(sequence.request.prompt)

    def _lane_of(self, sequence: Sequence) -> str:
        return "" if self.shares is None else sequence.request.tenant

    def _order(self) -> Iterator[str]:
        if self.shares is None or len(self._lanes) == 1:
            return iter(self._lanes)
        heap = [(self.shares.counter(tenant), place, tenant) for place, tenant in enumerate(self._lanes)]
        heapq.heapify(heap)
        return (heapq.heappop(heap)[2] for _ in range(len(heap)))
