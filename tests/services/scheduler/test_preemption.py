"""Preemption: whose memory goes, by which way, and that it comes back as it was."""

from __future__ import annotations

import random

import pytest

from services.scheduler.host_pool import HostPool
from services.scheduler.preemption import Costs
from services.scheduler.request import State
from tests.services.scheduler.simulation import VOCAB, Simulation, exhaust, toy_output

MODES = ("recompute", "swap", "auto")


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_of_40_blocks_finishes_100_requests_with_the_ids_they_have_alone(mode: str) -> None:
    """No livelock (vLLM 41951, 21809), no starving (vLLM 5578), nothing left behind; n = 1, 2 and 3 among them."""
    simulation = Simulation(
        num_blocks=41,
        block_size=4,
        max_num_seqs=16,
        host_blocks=40,
        preemption_mode=mode,
        scheduling_policy="priority",
    )
    rng, expected = random.Random(1), dict[tuple[int, int], list[int]]()
    oldest_of_top = 1
    for rid in range(1, 101):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        most, n, seed = rng.randint(1, 40), rng.choice([1, 1, 2, 3]), rng.randrange(1000)
        temperature = rng.choice([0.0, 1.0, 2.0])
        priority = 0 if rid == oldest_of_top else rng.randint(0, 2)
        simulation.submit(rid, prompt, most, n=n, seed=seed, temperature=temperature, priority=priority)
        expected |= {(rid, i): toy_output(prompt, most, temperature, seed + i) for i in range(n)}
    simulation.drain()
    assert simulation.outputs == expected
    assert simulation.done[oldest_of_top].preemptions == 0
    counts = simulation.scheduler.preemption.counts
    assert sum(counts.values()) > 5
    assert (counts["recompute"] > 0, counts["swap"] > 0) != (False, False)
    if mode == "recompute":
        assert counts["swap"] == 0
    if mode == "swap":
        assert counts["swap"] > 0
    simulation.check_nothing_is_left()
    assert simulation.scheduler.swaps.host.num_used == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_oldest_of_the_top_priority_is_never_preempted(mode: str) -> None:
    """Not even when all others were preempted more often than it."""
    simulation = Simulation(num_blocks=9, block_size=4, max_num_seqs=8, host_blocks=8, preemption_mode=mode)
    for rid in range(1, 9):
        simulation.submit(rid, [rid] * 3, 26)
    preempted: set[int] = set()
    while simulation.scheduler.load.running or simulation.scheduler.load.waiting:
        open_rids = [rid for rid, request in simulation.scheduler.streams.requests.items() if request.done is None]
        simulation.round()
        simulation.receive()
        for rid in open_rids[:1]:
            known = simulation.scheduler.streams.requests.get(rid)
            if known is not None and known.sequences[0].state is State.PREEMPTED:
                preempted.add(rid)
    assert not preempted
    assert simulation.done[1].preemptions == 0
    assert sum(done.preemptions for done in simulation.done.values()) > 3


def swapped_group(*, prompt: int, n: int, caching: bool) -> tuple[Simulation, dict[str, int]]:
    """A group of ``n`` that is swapped out and in: the simulation after it, and what its plans moved."""
    simulation = Simulation(
        num_blocks=14,
        block_size=4,
        max_num_seqs=8,
        host_blocks=13,
        preemption_mode="swap",
        enable_prefix_caching=caching,
    )
    simulation.submit(1, [1] * 9, 24)
    simulation.submit(2, list(range(prompt)), 8, n=n, temperature=1.0, seed=7)
    scheduler = simulation.scheduler
    moved = {"out": 0, "in": 0, "physical": 0, "logical": 0}
    group = scheduler.streams.requests[2].sequences
    while 2 not in simulation.done:
        before = [list(sequence.blocks) for sequence in group]
        swapping = bool(scheduler.swaps.leaving)
        plans = len(simulation.plans)
        simulation.round()
        if not swapping and scheduler.swaps.leaving:
            moved["physical"] = len({block for blocks in before for block in blocks})
            moved["logical"] = sum(map(len, before))
        for plan in simulation.plans[plans:]:
            if len(plan.swap_out):
                assert len(set(plan.swap_out[::2].tolist())) * 2 == len(plan.swap_out)
            moved["out"] += len(plan.swap_out) // 2
            moved["in"] += len(plan.swap_in) // 2
        simulation.receive(acknowledge=False)
    simulation.drain()
    for index in range(n):
        assert simulation.outputs[2, index] == toy_output(list(range(prompt)), 8, 1.0, 7 + index)
    return simulation, moved


def test_a_swapped_group_moves_each_block_once_and_shares_as_before() -> None:
    simulation, moved = swapped_group(prompt=16, n=3, caching=False)
    assert simulation.done[2].preemptions == 3  # whole: all of its sequences
    assert 0 < moved["physical"] < moved["logical"]  # it shared blocks
    assert moved["out"] == moved["in"] == moved["physical"]


def test_blocks_that_are_still_cached_are_not_moved_back() -> None:
    _, moved = swapped_group(prompt=16, n=3, caching=True)
    assert 0 < moved["in"] < moved["out"]


def test_a_cancelled_swapped_request_leaves_nothing_on_the_host() -> None:
    for rounds_after in range(4):  # cancelled while it leaves, on the way, and at rest
        simulation = Simulation(
            num_blocks=9, block_size=4, max_num_seqs=4, host_blocks=8, preemption_mode="swap", max_model_len=32
        )
        simulation.submit(1, [1] * 10, 18)
        simulation.submit(2, [2] * 10, 18)
        while not simulation.scheduler.queues.preempted:
            simulation.round()
        for _ in range(rounds_after):
            simulation.plan()
        simulation.scheduler.cancel(2)
        simulation.check()
        simulation.drain()
        assert simulation.finished[2, 0].reason == "abort"
        simulation.check_nothing_is_left()
        assert simulation.scheduler.swaps.host.num_used == 0


def test_without_room_on_the_host_swap_falls_back_to_recompute() -> None:
    simulation = Simulation(num_blocks=9, block_size=4, max_num_seqs=4, host_blocks=1, preemption_mode="swap")
    for rid in (1, 2, 3):
        simulation.submit(rid, [rid] * 9, 18)
    simulation.drain()
    assert simulation.scheduler.preemption.counts["swap"] == 0
    assert simulation.scheduler.preemption.counts["recompute"] > 0
    assert all(simulation.outputs[rid, 0] == toy_output([rid] * 9, 18) for rid in (1, 2, 3))


@pytest.mark.parametrize(("token", "block", "wanted"), [(1e-6, 1e-2, "recompute"), (1e-2, 1e-6, "swap")])
def test_auto_takes_what_is_predicted_cheaper_and_shows_both(token: float, block: float, wanted: str) -> None:
    simulation = Simulation(
        num_blocks=9, block_size=4, max_num_seqs=4, host_blocks=8, preemption_mode="auto", enable_prefix_caching=False
    )
    simulation.timings = lambda plan: {
        "forward": token * (len(plan.tokens) + plan.decodes),
        "swap_out": block * len(plan.swap_out) / 2,
        "swap_in": block * len(plan.swap_in) / 2,
    }
    for rid in range(1, 9):
        simulation.submit(rid, [rid] * 9, 18)
    simulation.drain()
    decisions = simulation.scheduler.preemption.status()["recent"]
    assert decisions[0]["mode"] == "swap"  # to measure it
    assert decisions[0]["predicted_swap"] is None
    later = [decision for decision in decisions if decision["predicted_swap"] is not None]
    assert len(later) > 2
    assert {decision["mode"] for decision in later} == {wanted}
    for decision in later:
        cheaper = min(decision["predicted_swap"], decision["predicted_recompute"])
        assert decision[f"predicted_{wanted}"] == cheaper
        assert decision["predicted_recompute"] == pytest.approx(token * decision["tokens"])
        assert decision["predicted_swap"] == pytest.approx(2 * block * decision["blocks"])
        # the token in flight comes on top of those that were predicted
        assert decision["measured"] == pytest.approx(cheaper, abs=token * decision["sequences"] * 1.001)


def test_costs_are_moving_averages_and_decodes_do_not_count_as_prefill() -> None:
    costs = Costs()
    assert costs.recompute(10) is None
    assert costs.swap(3) is None
    costs.observe({"forward": 1.0}, {"forward": 100}, prompt_tokens=10)  # mostly decodes
    assert costs.recompute(10) is None
    costs.observe({"forward": 1.0}, {"forward": 100}, prompt_tokens=90)
    assert costs.recompute(10) == pytest.approx(0.1)
    costs.observe({"forward": 2.0}, {"forward": 100}, prompt_tokens=90)
    assert costs.recompute(10) == pytest.approx(0.12)
    costs.observe({"swap_out": 0.5}, {"forward": 0, "swap_out": 5}, prompt_tokens=0)
    assert costs.swap(3) == pytest.approx(0.6)  # nothing came back yet: that is expected to cost the same
    costs.observe({"swap_in": 0.1}, {"forward": 0, "swap_in": 5}, prompt_tokens=0)
    assert costs.swap(3) == pytest.approx(0.36)


def test_a_recompute_is_predicted_with_what_the_cache_usually_gives_back() -> None:
    costs = Costs()
    costs.observe({"forward": 1.0}, {"forward": 100}, prompt_tokens=90)
    costs.came_back(tokens=40, cached=30)
    assert costs.recompute(100) == pytest.approx(0.25)
    costs.came_back(tokens=10, cached=0)  # weighs a fifth
    assert costs.recompute(100) == pytest.approx(0.4)


def test_the_share_that_is_still_cached_is_measured_where_sequences_come_back() -> None:
    """One sequence is preempted for another's block: all but its last, partial block is found again."""
    simulation = Simulation(num_blocks=9, block_size=4, max_num_seqs=2)
    for rid in (1, 2):
        simulation.submit(rid, [rid] * 12, 16)
    simulation.drain()
    preempted = next(done for done in simulation.done.values() if done.preemptions)
    kept = simulation.scheduler.preemption.status()["share_still_cached"]
    assert preempted.rid == 2
    assert 0 <= kept < 1
    came_back = [plan.new_rows[0].length for plan in simulation.plans[1:] if plan.new_rows]
    assert bool(kept) == bool(came_back[-1])


def test_the_host_pool_counts_holders_and_refuses_a_double_free() -> None:
    pool = HostPool(3)
    first = pool.allocate(2)
    pool.share(first[:1])
    pool.release(first)
    assert (pool.num_free, pool.num_used) == (2, 1)
    exhaust(pool.audit([first[:1]]))
    pool.release(first[:1])
    with pytest.raises(ValueError, match="free already"):
        pool.release(first[:1])
    with pytest.raises(ValueError, match="4 host blocks wanted, 3 free"):
        pool.allocate(4)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([0])
