"""From arrival times to figures, by hand; and what processes use, against a process of known use."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import measure, processes
from benchmarks.answers import Answer
from benchmarks.drive import Drive
from benchmarks.load import Request
from benchmarks.pipeline import CLIENT, bound


def answer(due: float, times: list[float], *, prompt: int = 10, cached: int | None = None) -> Answer:
    return Answer(
        Request([1] * prompt, prompt, len(times)), due, times, len(times), [], "x", "length", prompt, cached, ""
    )


def test_general_by_hand() -> None:
    drive = Drive([answer(0, [1, 2, 3]), answer(0, [2, 2.5]), answer(1, [4])], start=0, end=4, cpu=0)
    assert measure.general(drive) == {
        "tokens_per_s": 1.5,  # 6 in 4 s
        "ttft_p50": 2,  # of 1, 2, 3
        "ttft_p99": pytest.approx(2.98),
        "tpot_p50": 0.75,  # of 1 and 0.5; a single token has none
        "tpot_p99": pytest.approx(0.995),
    }


def test_hit_rate_by_hand() -> None:
    told = [answer(0, [1], prompt=544, cached=0), answer(0, [1], prompt=544, cached=512), answer(0, [1])]
    assert measure.hit_rate(told) == pytest.approx(512 / 1088)


def test_gaps_beside_a_long_prompt_by_hand() -> None:
    streams = [
        answer(0, [1, 2, 3, 4, 5, 7, 9, 11, 12]),
        answer(0, [1.5, 2.5, 3.5, 4.5, 6.5, 8.5, 10.5, 11.5, 13]),
    ]
    drive = Drive([*streams, answer(5, [11])], start=0, end=13, cpu=0)
    figures = measure.long_prompt(drive, streams=2)
    # All run from 1.5 to 12. Before 5: gaps of 1 only; the one across 5 counts for neither; from 5 to 11: gaps of 2.
    assert figures["gap_p99_alone"] == pytest.approx(1)
    assert figures["gap_p99_with"] == pytest.approx(2)
    assert figures["gap_growth"] == pytest.approx(2)
    assert figures["long_ttft"] == 6


def test_what_bounds_a_run() -> None:
    assert bound({"gateway 0": 0.95, "worker 0": 0.3, CLIENT: 0.2}, 4) == "gateway 0: a whole core"
    assert bound({"gateway 0": 0.95, CLIENT: 0.91}, 4) == "gateway 0, load generator: a core each"
    busy = {"gateway 0": 0.5, "gateway 1": 0.4, "tokenizer 0": 0.6, "worker 0": 0.3, CLIENT: 0.1}
    assert bound(busy, 2) == "all 2 cores, gateway the most (47%)"
    assert bound({"gateway 0": 0.5, "worker 0": 0.1}, 2) == "waiting: 0.6 of 2 cores in use"


PROGRAM = """
import subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
block = bytearray(b"x" * (50 << 20))
while time.process_time() < 0.5:
    pass
print("ready", flush=True)
time.sleep(60)
"""


def test_the_share_of_others_counts_only_them() -> None:
    spinner = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spinner) as other:
        try:
            time.sleep(0.5)  # an interpreter's start is not what is measured
            everybody, others = processes.Meter([]), processes.Meter([other.pid])
            time.sleep(1)
            used, all_share, others_share = others.used()[other.pid], everybody.others_share(), others.others_share()
        finally:
            other.kill()
    cores = os.cpu_count() or 1
    assert 0 < used <= 1.5
    assert 0.9 * used / cores <= all_share <= 1
    # One asks a moment after the other, and ticks are 10 ms.
    assert others_share == pytest.approx(all_share - used / cores, abs=0.1)


def test_memory_and_cpu_of_a_tree(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, start_new_session=True) as root:
        try:
            assert root.stdout is not None
            assert [root.stdout.readline(), root.stdout.readline()] == [b"ready\n"] * 2  # the child's, and its own
            pids = processes.tree(root.pid)
            assert len(pids) == 2 and pids[0] == root.pid

            async def watch() -> dict[str, int]:
                async with processes.watched_memory(root.pid) as peak:
                    await asyncio.sleep(0)
                return peak.bytes

            # Two blocks of 50 MiB and two interpreters of some 10.
            assert 100 << 20 < asyncio.run(watch())["anon"] < 160 << 20
            meter = processes.Meter(pids)
            assert sum(meter.used().values()) <= 0.02  # both sleep
            assert 0 <= meter.others_share() <= 1
            cpu = processes.cpu_seconds(pids)
            assert all(0.45 < used < 1.5 for used in cpu.values())
        finally:
            for pid in processes.tree(root.pid):
                subprocess.run(["kill", "-9", str(pid)], check=True)
