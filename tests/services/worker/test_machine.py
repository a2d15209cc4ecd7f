"""Device, dtype, threads and memory from made-up /proc and cgroup trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from services.worker import machine
from services.worker.config import WorkerConfig
from services.worker.machine import Cgroup
from shared.errors import ConfigError

CPU = torch.device("cpu")
GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cgroup(root: Path, membership: str, files: dict[str, str]) -> Cgroup:
    tree(root, {"membership": membership, **files})
    return Cgroup(root, root / "membership")


def test_version_2_takes_the_tightest_limit_up_to_the_root(tmp_path: Path) -> None:
    group = cgroup(
        tmp_path,
        "0::/a/b\n",
        {
            "a/b/cpu.max": "max 100000\n",
            "a/cpu.max": "150000 100000\n",
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "7\n",
            "a/memory.max": f"{4 * GIB}\n",
            "a/memory.current": f"{3 * GIB}\n",
            "a/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
    )
    assert group.cpus() == 1.5
    assert group.free_memory() == GIB + GIB // 2


def test_version_1(tmp_path: Path) -> None:
    group = cgroup(
        tmp_path,
        "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n",
        {  # as seen inside a container: the host's path does not exist, the mount shows the own group
            "cpu/cpu.cfs_quota_us": "200000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{GIB}\n",
            "memory/memory.stat": f"total_inactive_file {GIB // 4}\n",
        },
    )
    assert group.cpus() == 2.0
    assert group.free_memory() == GIB + GIB // 4


def test_no_limits(tmp_path: Path) -> None:
    group = cgroup(
        tmp_path,
        "4:memory:/\n2:cpu:/\n",
        {
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "5\n",
        },
    )
    assert group.cpus() is None and group.free_memory() is None
    empty = Cgroup(tmp_path / "none", tmp_path / "none")
    assert empty.cpus() is None and empty.free_memory() is None


@pytest.mark.parametrize(("quota", "threads"), [("50000", 1), ("100000", 1), ("199999", 1)])
def test_threads_stay_within_the_quota(tmp_path: Path, quota: str, threads: int) -> None:
    """vLLM 32651, 10971: more threads than a container may use, or one only."""
    group = cgroup(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000\n"})
    assert machine.compute_threads(0, group) == threads
    assert machine.compute_threads(2, group) == 2


def test_more_than_two_threads_a_cpu_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    free, held = Cgroup(Path("/nowhere"), Path("/nowhere")), cgroup(tmp_path, "0::/\n", {"cpu.max": "250000 100000\n"})
    assert machine.compute_threads(16, free) == 16
    with pytest.raises(ConfigError, match="--threads is 17, above its maximum of 16: two for each CPU"):
        machine.compute_threads(17, free)
    assert machine.compute_threads(6, held) == 6
    with pytest.raises(ConfigError, match="--threads is 1000, above its maximum of 6"):
        machine.compute_threads(1000, held)


def test_threads_are_at_most_the_affinity_mask(tmp_path: Path) -> None:
    group = cgroup(tmp_path, "0::/\n", {"cpu.max": "99900000 100000\n"})
    assert machine.compute_threads(0, group) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx2 avx512f", torch.float32),
        ("fpu avx512f avx512_bf16", torch.bfloat16),
        ("amx_bf16 amx_tile", torch.bfloat16),
        ("", torch.float32),
    ],
)
def test_dtype_follows_the_cpu(tmp_path: Path, flags: str, dtype: torch.dtype) -> None:
    cpuinfo = tree(tmp_path, {"cpuinfo": f"processor: 0\nflags\t\t: {flags}\n"}) / "cpuinfo"
    assert machine.pick_dtype("auto", CPU, cpuinfo) == dtype
    assert machine.pick_dtype("float16", CPU, cpuinfo) == torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda() -> None:
    assert machine.pick_device("auto") == CPU
    with pytest.raises(ConfigError, match="--device cuda"):
        machine.pick_device("cuda")


def test_free_memory_is_the_smaller_of_machine_and_cgroup(tmp_path: Path) -> None:
    meminfo = tree(tmp_path, {"meminfo": f"MemTotal: 9 kB\nMemAvailable:   {8 * 1024 * 1024} kB\n"}) / "meminfo"
    assert machine.free_host_memory(Cgroup(tmp_path, tmp_path / "none"), meminfo) == 8 * GIB
    group = cgroup(tmp_path, "0::/\n", {"memory.max": str(5 * GIB), "memory.current": str(2 * GIB)})
    assert machine.free_host_memory(group, meminfo) == 3 * GIB


def test_kv_budget(tmp_path: Path) -> None:
    group = cgroup(tmp_path, "0::/\n", {"memory.max": str(GIB), "memory.current": "0"})
    share = WorkerConfig(cpu_memory_utilization=0.5)
    assert machine.kv_budget(share, 0, group) == GIB // 2
    assert machine.kv_budget(share, GIB - 1000, group) == 1000
    assert machine.kv_budget(WorkerConfig(kv_cache_memory_bytes=12345), GIB, group) == 12345


def topology(root: Path, siblings: dict[int, str]) -> Path:
    return tree(root, {f"cpu{cpu}/topology/thread_siblings_list": f"{text}\n" for cpu, text in siblings.items()})


def test_a_thread_a_core_and_none_for_a_core_s_second_hardware_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5, 7})
    folder = topology(tmp_path, {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 6: "2,6"})  # of CPU 7 nothing is known
    assert machine.cores(folder) == [[0, 4], [1, 5], [7]]


def test_threads_are_kept_to_cores_only_where_they_take_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: [[0, 2], [1, 3]])
    assert machine.places(2) == [[0, 2], [1, 3]]
    assert machine.places(1) is None
    assert machine.places(3) is None
    monkeypatch.setattr(machine, "cores", lambda: [[3]])
    assert machine.places(1) is None
    assert machine.compute_threads(0, Cgroup(Path("/nowhere"), Path("/nowhere"))) == 1
