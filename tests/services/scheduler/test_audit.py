"""The idle server's audit of its own memory: exact, and it reports rather than kills (sglang 35270)."""

from __future__ import annotations

from services.scheduler.free_runs import AUDITED
from services.scheduler.invariants import Audit
from tests.services.scheduler.simulation import Simulation, toy_output


def audited(audit: Audit, simulation: Simulation) -> str:
    """What one tick of the server finds, and all loops until the check it may have begun is over."""
    audit.begin(simulation.scheduler)
    while audit.is_under_way:
        if problem := audit.go_on(simulation.scheduler):
            return problem
    return ""


def test_a_healthy_server_with_shared_and_cached_blocks_passes_and_a_leak_is_named() -> None:
    simulation, audit = Simulation(), Audit()
    for rid in range(3):
        simulation.submit(rid, [5] * 40, 10, n=2, temperature=1.0)
    simulation.round()
    assert audited(audit, simulation) == "", "not while it works"
    simulation.drain()
    assert audited(audit, simulation) == ""
    (leaked,) = simulation.scheduler.pool.allocate(1, "nobody", "prompt")
    assert audited(audit, simulation) == "", "not again before it has worked again"
    simulation.executor = simulation.new_executor()
    simulation.scheduler.restart(worker_epoch=3)
    simulation.check = lambda: None  # type: ignore[method-assign]
    simulation.submit(9, [6] * 5, 3)
    simulation.drain()
    assert audited(audit, simulation) == f"block {leaked} has 1 references, 0 uses"
    simulation.submit(10, [7] * 5, 3)
    simulation.drain()
    assert simulation.outputs[10, 0] == toy_output([7] * 5, 3), "and it goes on"


def test_a_check_of_a_large_pool_goes_bit_by_bit_and_starts_over_after_a_step() -> None:
    blocks = 20 * AUDITED
    simulation, audit = Simulation(num_blocks=blocks, max_model_len=64), Audit()
    simulation.submit(1, [5] * 40, 10)
    simulation.drain()
    audit.begin(simulation.scheduler)
    slices = 0
    while audit.is_under_way:
        assert audit.go_on(simulation.scheduler) == ""
        slices += 1
    assert slices > 4 * 20, "each of runs, pool, cache and tables takes twenty slices"
    simulation.submit(2, [6] * 40, 10)
    simulation.drain()
    audit.begin(simulation.scheduler)
    assert audit.go_on(simulation.scheduler) == ""
    simulation.submit(3, [7] * 40, 10)
    assert audit.go_on(simulation.scheduler) == ""
    assert not audit.is_under_way, "the memory changes under it"
    simulation.drain()
    assert audited(audit, simulation) == ""
