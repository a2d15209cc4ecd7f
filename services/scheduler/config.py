"""Options of ``quire scheduler``."""

from __future__ import annotations

from dataclasses import dataclass

from shared import options
from shared.config import option


@dataclass(frozen=True)
class SchedulerConfig:
    model: str = options.model()
    bind: str = option("", "address to listen on: ipc:///directory or tcp://host:port (workers: port + 1)")
    tensor_parallel_size: int = option(1, "worker ranks to wait for", minimum=1, maximum=64, flags=("-tp",))
    max_num_seqs: int = option(256, "sequences that run at once", minimum=1, maximum=65536)
    max_num_batched_tokens: int = option(2048, "tokens computed in one step", minimum=1, maximum=1 << 20)
    max_step_ms: float | None = option(
        None,
        "milliseconds that prompts may stretch a step to while others stream; 0: any number; default: by their pace",
        minimum=0,
    )
    max_num_queued_reqs: int = option(4096, "requests that may wait; further ones get 429", minimum=1)
    max_num_queued_tokens: int | None = option(None, "prompt tokens that may wait; beyond, requests get 429", minimum=1)
    max_queue_time: float | None = option(None, "seconds a request may wait before its first step", minimum=0.001)
    scheduling_policy: str = option(
        "fcfs",
        "who runs first: the oldest; the lowest 'priority' field; or the tenant with the least service for its weight",
        choices=("fcfs", "priority", "fair"),
    )
    preemption_mode: str = option(
        "recompute",
        "how requests that lose their memory to others get it back; swap needs --swap-space, auto takes the cheaper",
        choices=("recompute", "swap", "auto"),
    )
    tenant_weights: list[str] = option([], "NAME=WEIGHT, shares under --scheduling-policy fair; others have 1")
    enable_prefix_caching: bool = option(True, "find the KV of prompts' beginnings in blocks computed before")
    prefix_isolation: str = option(
        "none", "tenant: no tenant's prompts hit blocks that another tenant's wrote", choices=("none", "tenant")
    )
    step_timeout: float = option(300.0, "seconds after which a step without result counts as hung", minimum=1)
    download_dir: str = option("", "where models are kept; default: the user's cache")
    plan_log: str = option("", "append one JSON line per plan to this file")
    disable_log_stats: bool = option(False, "no throughput line every ten seconds")
    cluster_key_file: str = options.cluster_key_file()
    insecure_tcp: bool = options.insecure_tcp()
    log_level: str = options.log_level()
