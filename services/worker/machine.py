"""What this process may use of the machine: device, dtype, threads and memory, with container limits counted."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.config import WorkerConfig
from shared.errors import ConfigError

_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


def pick_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def pick_dtype(wanted: str, device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> torch.dtype:
    """auto: bfloat16 on GPUs and on CPUs that multiply it in hardware (AVX512_BF16 or AMX), else float32."""
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16
    flags = next((line.split() for line in _lines(cpuinfo) if line.startswith("flags")), [])
    return torch.bfloat16 if {"avx512_bf16", "amx_bf16"} & set(flags) else torch.float32


@dataclass(frozen=True)
class Cgroup:
    """The control groups of this process, version 1 or 2; a limit anywhere up to the root counts."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def cpus(self) -> float | None:
        """CPUs that the quota allows, None without one."""
        quotas = []
        for folder in self._folders("cpu"):
            if line := _lines(folder / "cpu.max"):
                quota, period = line[0].split()
                if quota != "max":
                    quotas.append(int(quota) / int(period))
            quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
            if quota_us and period_us and quota_us > 0:
                quotas.append(quota_us / period_us)
        return min(quotas, default=None)

    def free_memory(self) -> int | None:
        """Bytes below the tightest memory limit, page cache counted as free; None without a limit."""
        free = []
        for folder in self._folders("memory"):
            for limit_name, usage_name, cache_name in (
                ("memory.max", "memory.current", "inactive_file"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            ):
                limit, usage = _number(folder / limit_name), _number(folder / usage_name)
                if limit is not None and usage is not None and limit < _NO_LIMIT:
                    stat = dict(line.split() for line in _lines(folder / "memory.stat"))
                    free.append(limit - usage + int(stat.get(cache_name, 0)))
        return min(free, default=None)

    def _folders(self, controller: str) -> list[Path]:
        found = []
        for line in _lines(self.membership):
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                mounts = [self.root, self.root / "unified"]
            elif controller in controllers.split(","):
                mounts = [self.root / controller, self.root / controllers]
            else:
                continue
            # Inside a container the path may be the host's, while the mount shows the container's own group as root.
            inner = Path(path.lstrip("/"))
            found += [mount / part for mount in mounts for part in (inner, *inner.parents)]
        return list(dict.fromkeys(found))


def cores(topology: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """The CPUs that the affinity mask leaves, by the core whose hardware threads they are."""
    found: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _lines(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        found.setdefault(siblings[0] if siblings else f"only {cpu}", []).append(cpu)
    return list(found.values())


def compute_threads(wanted: int, cgroup: Cgroup) -> int:
    """Threads for computing: as asked, else a core each, as far as the affinity mask and the cgroup's quota go.

    Raises ConfigError for more than two a CPU, whose barriers take the machine's whole time.
    """
    quota = cgroup.cpus()
    if not wanted:
        return max(1, min(len(cores()), int(quota) if quota else 1 << 20))
    cpus = min(len(os.sched_getaffinity(0)), math.ceil(quota) if quota else 1 << 20)
    if wanted > 2 * cpus:
        raise ConfigError(
            f"--threads is {wanted}, above its maximum of {2 * cpus}: two for each CPU this process may use"
        )
    return wanted


def places(threads: int) -> list[list[int]] | None:
    """The CPUs that each thread for computing is kept to; None: the system places them.

    Where they take every core, one that was moved to another's, because a process of the server had its own for a
    moment, stays there for a whole step, which takes twice its time. Where they leave cores free, the system has better
    places for them than the ones we would name, which other programs may use.
    """
    found = cores()
    return found if threads == len(found) > 1 else None


def free_host_memory(cgroup: Cgroup, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be allocated without swapping or meeting the cgroup's limit."""
    fields = dict(line.split(":") for line in _lines(meminfo))
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = cgroup.free_memory()
    return max(0, free if limit is None else min(free, limit))


def kv_budget(config: WorkerConfig, reserve: int, cgroup: Cgroup) -> int:
    """Bytes for KV on a CPU, the model being loaded: as asked, else a share of memory. reserve: bytes kept for
    activations."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    free = free_host_memory(cgroup)
    return min(int(free * config.cpu_memory_utilization), free - reserve)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].lstrip("-").isdigit() else None
