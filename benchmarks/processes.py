"""What a process and all it started use: memory and CPU time, from /proc."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
RESTING = 0.03
MEMORY = {"RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem"}


@dataclass(frozen=True)
class Stat:
    """The fields used of /proc/PID/stat. cpu: seconds in user and kernel mode, threads included."""

    parent: int
    session: int
    cpu: float


def stat(pid: int) -> Stat | None:
    """None when the process is gone."""
    with suppress(OSError):
        # The command's name, in parentheses, may hold anything.
        fields = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
        return Stat(int(fields[1]), int(fields[3]), (int(fields[11]) + int(fields[12])) / TICKS)
    return None


def tree(root: int) -> list[int]:
    """The process, all that descend from it, and all of the session it leads."""
    stats = {
        int(entry.name): one for entry in PROC.iterdir() if entry.name.isdigit() and (one := stat(int(entry.name)))
    }
    found = [pid for pid, one in stats.items() if pid == root or one.session == root]
    for parent in found:  # grows while it is walked
        found += [pid for pid, one in stats.items() if one.parent == parent and pid not in found]
    return found


def cpu_seconds(pids: list[int]) -> dict[int, float]:
    return {pid: one.cpu for pid in pids if (one := stat(pid)) is not None}


def memory(pids: list[int]) -> dict[str, int]:
    """Bytes resident over the processes: ``anon`` their own, ``file`` mapped files, ``shmem`` shared memory."""
    total = dict.fromkeys(MEMORY.values(), 0)
    for pid in pids:
        with suppress(OSError):
            for line in (PROC / str(pid) / "status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in MEMORY:
                    total[MEMORY[name]] += int(value.split()[0]) * 1024
    return total


def machine_cpu() -> float:
    """Seconds of CPU that all processes of this machine have used since it started."""
    fields = [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / TICKS


class Meter:
    """CPU use from its making on: of these processes, and of everything on the machine but them and this process."""

    def __init__(self, pids: list[int]) -> None:
        self._start = cpu_seconds(pids)
        self._machine, self._own, self._time = machine_cpu(), time.process_time(), time.perf_counter()

    def used(self) -> dict[int, float]:
        """Seconds by process."""
        return {pid: cpu - self._start[pid] for pid, cpu in cpu_seconds(list(self._start)).items()}

    def others_share(self) -> float:
        """Share of the machine that others used, 0 to 1."""
        ours = sum(self.used().values()) + time.process_time() - self._own
        most = (time.perf_counter() - self._time) * (os.cpu_count() or 1)
        # The kernel counts in ticks: over a few milliseconds one tick can be more than the machine had.
        return min(1.0, max(0.0, machine_cpu() - self._machine - ours) / most)


async def rest(most: float) -> bool:
    """Waits until all processes but this one use less than RESTING of the machine, ``most`` seconds at most; whether
    they do. An engine's threads may spin for a while after its last answer, on cores that another one then lacks."""
    deadline = time.perf_counter() + most
    while time.perf_counter() < deadline:
        meter = Meter([])
        await asyncio.sleep(min(0.5, most))
        if meter.others_share() < RESTING:
            return True
    return False


@dataclass
class Peak:
    """Greatest resident memory seen, in bytes, each kind at its own time."""

    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, now: dict[str, int]) -> None:
        for kind, value in now.items():
            self.bytes[kind] = max(value, self.bytes.get(kind, 0))


@asynccontextmanager
async def watched_memory(root: int | None) -> AsyncIterator[Peak]:
    """Samples a tree's memory while the block runs; with no root nothing is seen."""
    peak = Peak()

    async def sample() -> None:
        while root is not None:
            pids = tree(root)  # walks all of /proc, which the clocks of a load generator would feel if it were often
            for _ in range(20):
                peak.add(memory(pids))
                await asyncio.sleep(0.5)

    task = asyncio.create_task(sample())
    try:
        yield peak
    finally:
        if root is not None:
            peak.add(memory(tree(root)))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
