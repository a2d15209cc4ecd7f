"""The waiting queue by itself: order by policy, removal anywhere, who may pass, and tenants' counters by hand."""

from __future__ import annotations

import pytest

from services.scheduler.fair_shares import FairShares
from services.scheduler.outbox import Outbox
from services.scheduler.prefix_cache import Chain
from services.scheduler.request import Request, Sequence
from services.scheduler.waiting import LOOKAHEAD, MAX_PASSES, WaitingQueue
from shared.codec import int32
from shared.sampling import SamplingParams


def sequence(order: int, *, priority: int = 0, tenant: str = "", tokens: int = 10) -> Sequence:
    prompt = int32([1] * tokens)
    request = Request(
        order, f"r{order}", Outbox(b""), prompt, SamplingParams(), 5, frozenset(), priority, order, 0.0, tenant
    )
    return Sequence(request, 0, [], Chain(b""))


def orders(sequences: object) -> list[int]:
    return [one.request.order for one in sequences]  # type: ignore[attr-defined]


def test_fcfs_is_the_order_of_arrival_and_priority_the_lowest_first() -> None:
    for policy, expected in (("fcfs", [1, 2, 3, 4]), ("priority", [2, 4, 1, 3])):
        queue = WaitingQueue(policy)
        priorities = (0, 0, 0, 0) if policy == "fcfs" else (5, -1, 5, 0)
        for order, priority in enumerate(priorities, 1):
            queue.add(sequence(order, priority=priority))
        assert orders(queue) == orders(queue.candidates()) == expected


def test_any_sequence_can_leave_and_sizes_follow() -> None:
    queue = WaitingQueue("priority")
    waiting = [sequence(order, priority=order % 2, tokens=order) for order in range(1, 6)]
    for one in waiting:
        queue.add(one)
    assert (len(queue), queue.tokens) == (5, 15)
    for one in (waiting[1], waiting[3], waiting[0]):
        queue.remove(one)
    assert orders(queue) == [3, 5]
    assert (len(queue), queue.tokens) == (2, 8)
    with pytest.raises(KeyError):
        queue.remove(waiting[1])


def test_candidates_end_at_the_lookahead_and_at_one_that_was_passed_often_enough() -> None:
    queue = WaitingQueue("fcfs")
    waiting = [sequence(order) for order in range(LOOKAHEAD + 5)]
    for one in waiting:
        queue.add(one)
    assert len(list(queue.candidates())) == LOOKAHEAD
    waiting[2].passes = MAX_PASSES
    assert orders(queue.candidates()) == [0, 1, 2]


def test_fair_takes_the_tenant_with_the_least_service_and_then_tenants_in_turn() -> None:
    queue = WaitingQueue("fair")
    assert queue.shares is not None
    for order, tenant in enumerate("aaabb", 1):
        queue.add(sequence(order, tenant=tenant))
    queue.shares.serve("a", prompt_tokens=1)
    assert orders(queue.candidates()) == [4, 1, 5, 2, 3]
    queue.shares.serve("b", output_tokens=1)  # an output token counts twice
    assert orders(queue.candidates()) == [1, 4, 2, 5, 3]


def test_counters_grow_by_service_over_weight() -> None:
    shares = FairShares({"gold": 4.0})
    shares.serve("gold", prompt_tokens=100, output_tokens=50)
    shares.serve("plain", prompt_tokens=100, output_tokens=50)
    assert shares.counters() == {"gold": 50.0, "plain": 200.0}


def test_who_comes_back_is_lifted_and_saves_nothing_up() -> None:
    shares = FairShares({})
    for tenant in ("a", "b"):
        shares.arrive(tenant, [])
    shares.serve("a", prompt_tokens=100)
    shares.serve("b", prompt_tokens=60)
    shares.arrive("late", ["a", "b"])
    assert shares.counter("late") == 60
    shares.leave("a")  # now nobody waits, and a waited last
    shares.serve("a", output_tokens=10)
    shares.arrive("later", [])
    assert shares.counter("later") == 120
    shares.arrive("b", ["later"])
    assert shares.counter("b") == 120


def test_counters_of_tenants_who_would_be_lifted_anyway_are_forgotten() -> None:
    shares = FairShares({})
    for number in range(100):
        shares.arrive(f"t{number}", [])
        shares.serve(f"t{number}", prompt_tokens=1)
        shares.leave(f"t{number}")
    shares.serve("ahead", prompt_tokens=1000)
    shares.forget(active=["t5"], waiting=[])
    assert set(shares.counters()) == {"t5", "t99", "ahead"}
