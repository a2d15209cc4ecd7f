"""The idle server's audit of its own memory: exact, and it reports rather than kills (sglang 35270)."""

from __future__ import annotations

from services.scheduler.invariants import Audit
from tests.services.scheduler.simulation import Simulation, toy_output


def test_a_healthy_server_with_shared_and_cached_blocks_passes_and_a_leak_is_named() -> None:
    simulation, audit = Simulation(), Audit()
    for rid in range(3):
        simulation.submit(rid, [5] * 40, 10, n=2, temperature=1.0)
    simulation.round()
    assert audit(simulation.scheduler) == "", "not while it works"
    simulation.drain()
    assert audit(simulation.scheduler) == ""
    (leaked,) = simulation.scheduler.pool.allocate(1, "nobody", "prompt")
    assert audit(simulation.scheduler) == "", "not again before it has worked again"
    simulation.executor = simulation.new_executor()
    simulation.scheduler.restart(worker_epoch=3)
    simulation.check = lambda: None  # type: ignore[method-assign]
    simulation.submit(9, [6] * 5, 3)
    simulation.drain()
    assert audit(simulation.scheduler) == f"block {leaked} has 1 references, 0 uses"
    simulation.submit(10, [7] * 5, 3)
    simulation.drain()
    assert simulation.outputs[10, 0] == toy_output([7] * 5, 3), "and it goes on"
