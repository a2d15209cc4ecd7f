from __future__ import annotations

import re

from services.scheduler.stats import ITERATION_BUCKETS, Load, Stats, size_buckets
from tests.services.scheduler.simulation import Simulation

LINE = re.compile(
    r"Avg prompt throughput: (\d+\.\d) tokens/s, Avg generation throughput: (\d+\.\d) tokens/s, "
    r"Running: (\d+) reqs, Waiting: (\d+) reqs, GPU KV cache usage: (\d+\.\d)%, Prefix cache hit rate: (\d+\.\d)%"
)
IDLE = Load(running=0, waiting=0, preempted=0, blocks_used=0, blocks_total=40, blocks_cached=0)
BUSY = Load(running=3, waiting=2, preempted=1, blocks_used=10, blocks_total=40, blocks_cached=20)


def value(stats: Stats, name: str, labels: tuple[str, ...] = ()) -> float:
    series = stats.registry.snapshot()[name][3]
    return next(number for found, number in series if tuple(found) == labels)


def test_the_line_comes_every_ten_seconds_while_something_happens() -> None:
    stats = Stats(Simulation().limits)
    assert stats.line(BUSY, 100.0) is None
    stats.prompt_computed(500)
    stats.delivered(250)
    assert stats.line(BUSY, 109.0) is None
    match = LINE.fullmatch(stats.line(BUSY, 110.0) or "")
    assert match is not None
    assert match.groups() == ("50.0", "25.0", "3", "2", "25.0", "0.0")
    assert LINE.fullmatch(stats.line(IDLE, 120.0) or "")  # the last one says that it is over
    assert stats.line(IDLE, 130.0) is None


def test_tokens_behind_a_stop_string_are_paid_back() -> None:
    stats = Stats(Simulation().limits)
    stats.delivered(10)
    stats.taken_back(3)
    assert value(stats, "vllm:generation_tokens") == 10
    stats.delivered(2)
    assert value(stats, "vllm:generation_tokens") == 10
    stats.delivered(5)
    assert value(stats, "vllm:generation_tokens") == 14


def test_gauges_and_their_reasons() -> None:
    stats = Stats(Simulation().limits)
    stats.refresh(BUSY, {"memory": 1, "preempted": 1})
    assert value(stats, "vllm:num_requests_running") == 3
    assert value(stats, "vllm:num_requests_waiting") == 2
    assert value(stats, "vllm:kv_cache_usage_perc") == 0.25
    assert value(stats, "vllm:num_requests_waiting_by_reason", ("capacity",)) == 1
    assert value(stats, "vllm:num_requests_waiting_by_reason", ("deferred",)) == 1


def test_buckets_are_those_dashboards_know() -> None:
    assert ITERATION_BUCKETS == (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert size_buckets(700) == [1, 2, 5, 10, 20, 50, 100, 200, 500]


def test_preemptions_and_ends_are_counted() -> None:
    simulation = Simulation(num_blocks=9)
    for rid in range(1, 7):
        simulation.submit(rid, [rid] * 10, 40)
    simulation.scheduler.cancel(6)
    simulation.drain()
    stats = simulation.scheduler.stats
    assert value(stats, "vllm:num_preemptions") == sum(done.preemptions for done in simulation.done.values()) > 0
    assert value(stats, "vllm:request_success", ("length",)) == 5
    assert value(stats, "vllm:request_success", ("abort",)) == 1
    assert value(stats, "vllm:generation_tokens") == 200
    assert value(stats, "vllm:prompt_tokens") == 50  # once each, however often they were computed
