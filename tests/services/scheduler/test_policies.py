"""Scheduling policies and the limits of queue and time, on a virtual clock."""

from __future__ import annotations

import random

import pytest

from services.scheduler.fair_shares import INPUT, OUTPUT
from services.scheduler.waiting import MAX_PASSES
from shared.errors import RequestError
from tests.services.scheduler.simulation import Simulation, toy_output


def delivered(simulation: Simulation, tenant: dict[int, str]) -> dict[str, float]:
    """Service by tenant from what was sent alone: prompts of requests that began, and output tokens."""
    service = dict.fromkeys(tenant.values(), 0.0)
    prompts = {rid: len(request.prompt) for rid, request in simulation.scheduler.streams.requests.items()}
    for (rid, _), output in simulation.outputs.items():
        service[tenant[rid]] += INPUT * prompts.get(
            rid, simulation.done[rid].prompt_tokens if rid in simulation.done else 0
        )
        service[tenant[rid]] += OUTPUT * len(output)
    return service


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_two_tenants_one_with_ten_times_the_load_stay_within_the_bound(weight: float) -> None:
    """Service per weight of tenants who both always wait differs by 2 max(INPUT L, OUTPUT M) at most (VTC)."""
    longest, most_tokens = 40, 24
    simulation = Simulation(
        num_blocks=41,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        scheduling_policy="fair",
        tenant_weights={"heavy": weight},
    )
    rng, rid, tenants = random.Random(0), 0, {}
    bound = 2 * max(INPUT * longest, OUTPUT * 40 * 16)  # M: the tokens that the whole pool holds
    worst = 0.0
    for step in range(1200):
        for tenant, load in (("light", 8), ("heavy", 80)):
            waiting = [s for s in simulation.scheduler.queues.waiting if s.request.tenant == tenant]
            if len(waiting) < load:  # both always wait, as the bound demands
                for _ in range(load):
                    rid += 1
                    tenants[rid] = tenant
                    prompt = [rng.randrange(64) for _ in range(rng.randint(1, longest))]
                    simulation.submit(rid, prompt, rng.randint(1, most_tokens), tenant=tenant)
        simulation.round()
        simulation.receive(acknowledge=False)
        simulation.now += 0.02
        if step % 20 == 0 and rid > 50:
            service = delivered(simulation, tenants)
            worst = max(worst, abs(service["heavy"] / weight - service["light"]))
    service = delivered(simulation, tenants)
    assert worst <= bound
    assert min(service.values()) > 2 * bound  # so that the bound says something
    assert service["heavy"] / service["light"] == pytest.approx(weight, rel=0.15)


def test_under_fcfs_the_heavy_tenant_gets_ten_times_the_service() -> None:
    """The same load without shares: what fair is there for."""
    simulation = Simulation(num_blocks=41, max_num_seqs=4)
    tenants = {}
    for rid in range(1, 111):
        tenants[rid] = "light" if rid % 11 == 0 else "heavy"
        simulation.submit(rid, [rid % 64] * 10, 10, tenant=tenants[rid])
    for _ in range(150):
        simulation.round()
    simulation.receive(acknowledge=False)
    service = delivered(simulation, tenants)
    assert service["heavy"] / service["light"] == pytest.approx(10, rel=0.25)


def test_under_priority_the_high_one_goes_first() -> None:
    simulation = Simulation(max_num_seqs=1, scheduling_policy="priority")
    simulation.submit(1, [5] * 10, 3, priority=5)
    simulation.submit(2, [5] * 10, 3, priority=5)
    simulation.submit(3, [5] * 10, 3, priority=-5)
    simulation.drain()
    assert list(simulation.done) == [3, 1, 2]


def test_a_priority_that_has_no_effect_is_refused() -> None:
    simulation = Simulation()
    with pytest.raises(RequestError, match="priority is 3, but this server's scheduling policy is 'fcfs'") as error:
        simulation.submit(1, [5], 3, priority=3)
    assert (error.value.status, error.value.param) == (400, "priority")


def test_smaller_requests_pass_a_head_that_does_not_fit_and_then_it_reserves() -> None:
    """A long prompt at the head neither blocks shorter ones (vLLM 57413) nor waits for ever behind them."""
    simulation = Simulation(num_blocks=12, max_num_seqs=8, max_num_batched_tokens=200)
    simulation.submit(1, [1] * 40, 60)
    simulation.plan()
    simulation.submit(2, [2] * 170, 3)  # all 11 blocks, which are never free while small ones keep coming
    admitted_after = []
    for rid in range(3, 3 + MAX_PASSES + 20):
        simulation.submit(rid, [rid % 64] * 8, 3)
        simulation.round()
        if simulation.scheduler.streams.requests[2].scheduled is None:
            admitted_after += [
                r for r in range(3, rid + 1) if simulation.scheduler.streams.requests[r].scheduled is not None
            ]
    passed = set(admitted_after)
    assert len(passed) == MAX_PASSES
    simulation.drain()
    for rid in (2, 3 + MAX_PASSES + 19):
        assert simulation.finished[rid, 0].reason == "length"
    assert simulation.outputs[2, 0] == toy_output([2] * 170, 3)


# ---- limits --------------------------------------------------------------------------------------------------------


def test_queued_tokens_are_bounded_beyond_what_can_start_at_once() -> None:
    """An unbounded queue is refused with 429 and Retry-After (vLLM 18826); a first request always comes in."""
    simulation = Simulation(num_blocks=11, max_num_seqs=1, max_num_queued_tokens=100)
    simulation.submit(1, [5] * 150, 5)
    simulation.plan()
    simulation.submit(2, [5] * 60, 5)
    simulation.submit(3, [5] * 40, 5)
    with pytest.raises(
        RequestError, match=r"100 prompt tokens are waiting already.*has 1 .max_num_queued_tokens is 100"
    ) as error:
        simulation.submit(4, [5], 5)
    assert (error.value.status, error.value.code) == (429, "queue_full")
    assert error.value.retry_after is not None and error.value.retry_after >= 1
    simulation.submit(5, [5], 5, generated=[toy_output([5], 2)])  # what ran already, elsewhere, passes
    simulation.drain()


def test_n_counts_n_in_the_queue() -> None:
    """A request of n sequences takes n places (vLLM 2901)."""
    simulation = Simulation(max_num_seqs=4, max_num_queued_reqs=3)
    simulation.submit(1, [5] * 10, 3, n=4)
    with pytest.raises(RequestError, match="max_num_queued_reqs is 3"):
        simulation.submit(2, [5] * 10, 3, n=4)
    with pytest.raises(RequestError, match="max_num_queued_reqs is 3"):
        simulation.submit(3, [5] * 10, 3, n=1, best_of=4)
    simulation.submit(4, [5] * 10, 3, n=1, best_of=3)


def test_a_request_that_waits_longer_than_max_queue_time_is_dropped_rather_than_run() -> None:
    """Queued requests do not outlive their client's patience (vLLM 16391)."""
    simulation = Simulation(max_num_seqs=1, max_queue_time=5.0)
    simulation.submit(1, [5] * 10, 90)
    simulation.submit(2, [6] * 10, 3)
    for _ in range(3):
        simulation.round()
    simulation.now = 4.9
    simulation.scheduler.expire()
    assert simulation.scheduler.load.waiting == 1
    simulation.now = 5.0
    simulation.scheduler.expire()
    simulation.receive(acknowledge=False)
    finished = simulation.finished[2, 0]
    assert (finished.reason, finished.code, finished.tokens) == ("error", "queue_timeout", 0)
    assert finished.message == "waited 5.0 s: max_queue_time is 5 s"
    assert 2 in simulation.done
    simulation.drain()
    assert simulation.finished[1, 0].reason == "length"  # it ran, and running is not waiting


def test_a_deadline_ends_a_request_waiting_or_running() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.submit(1, [5] * 10, 900, timeout=2.0)
    simulation.submit(2, [6] * 10, 3, timeout=2.0)
    simulation.submit(3, [7] * 10, 3, timeout=60.0)
    for _ in range(5):
        simulation.round()
    simulation.now = 2.5
    simulation.scheduler.expire()
    simulation.drain()
    assert [simulation.finished[rid, 0].code for rid in (1, 2, 3)] == ["deadline_exceeded", "queue_timeout", ""]
    assert simulation.finished[1, 0].message == "not complete 2.5 s after its arrival: timeout is 2 s"
    assert simulation.outputs[1, 0] == toy_output([5] * 10, simulation.finished[1, 0].tokens)
    assert simulation.outputs[3, 0] == toy_output([7] * 10, 3)
    simulation.check_nothing_is_left()


# ---- why requests wait ---------------------------------------------------------------------------------------------


def test_every_waiting_sequence_has_its_reason() -> None:
    simulation = Simulation(num_blocks=11, max_num_seqs=2, max_num_batched_tokens=64)
    scheduler = simulation.scheduler
    simulation.submit(1, [1] * 60, 20)
    simulation.submit(2, [2] * 60, 20)
    assert scheduler.admission.waiting_by_reason() == {"turn": 2}  # no plan yet
    simulation.plan()
    assert scheduler.admission.waiting_by_reason() == {}
    simulation.execute()
    simulation.retire()
    simulation.submit(3, [3] * 150, 3)
    simulation.submit(4, [4] * 5, 3)
    simulation.round()
    simulation.round()
    assert scheduler.admission.waiting_by_reason() == {"slots": 2}
    scheduler.cancel(2)
    simulation.submit(5, [5] * 5, 3)
    scheduler.cancel(4)
    scheduler.cancel(5)
    for _ in range(3):
        simulation.round()
    assert scheduler.admission.waiting_by_reason() == {"memory": 1}
    simulation.drain()
    assert scheduler.admission.waiting_by_reason() == {}
