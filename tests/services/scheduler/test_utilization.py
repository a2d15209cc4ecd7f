"""How full the blocks are under ShareGPT-shaped lengths, as the metric says and, apart, as the ledger says."""

from __future__ import annotations

from benchmarks.utilization import Workload, measure, slots
from services.scheduler import ledger
from services.scheduler.scheduler import Scheduler


def by_the_ledger(scheduler: Scheduler) -> tuple[int, int]:
    """Slots of blocks in use, and filled ones, from all pages."""
    cursor, used, filled = 1, 0, 0
    while 0 < cursor <= scheduler.pool.num_usable:
        page, cursor = ledger.page(scheduler, cursor, 0.0, 0.0)
        rows = [row for row in page["blocks"] if row["state"] == "used"]
        used += len(rows)
        filled += sum(row["filled"] for row in rows)
    return used * scheduler.limits.block_size, filled


def test_blocks_in_use_are_full_and_so_is_the_pool_while_requests_wait() -> None:
    """An eighth of ShareGPT's lengths on blocks of two tokens; about 64 sequences run at once."""
    checked = 0

    def compare(scheduler: Scheduler) -> None:
        nonlocal checked
        assert slots(scheduler) == by_the_ledger(scheduler)
        assert scheduler.queues.num_waiting
        checked += 1

    found = measure(Workload(scale=8, num_blocks=2000, places=128, steps=800, preemption_mode="swap"), compare)
    assert checked >= 100
    assert 55 <= found.running <= 80
    assert found.in_use >= 0.98
    assert found.whole_pool >= 0.963
