"""How full KV memory is under ShareGPT's lengths: the real scheduler on the null worker, requests always waiting.

    python -m benchmarks.utilization [--scale 1] [--blocks 984] [--places 64] [--steps 3000]

Filled slots over the slots of blocks in use, and over the whole pool, each physical slot counted once, as the metric
``quire:kv_slots`` tells them after every fifth step. ``--scale 8`` divides all lengths and the block size by 8.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.load import SHAREGPT_CONTEXT, SHAREGPT_INPUT, SHAREGPT_OUTPUT, inverse_cdf
from services.scheduler import ledger
from services.scheduler.limits import Limits
from services.scheduler.scheduler import Scheduler
from services.scheduler.stats import Stats
from services.worker.null import NullExecutor
from shared.codec import int32
from shared.sampling import SamplingParams
from shared.wire import Plan, SubmitTokens

VOCAB = 49_152
WAITING = 16  # requests that are kept waiting
WARM_UP = 0.25  # of the steps, which are not measured


@dataclass(frozen=True)
class Workload:
    """Lengths are ShareGPT's over ``scale``, blocks of 16 over ``scale``."""

    scale: int = 1
    num_blocks: int = 984
    places: int = 64
    steps: int = 3000
    preemption_mode: str = "recompute"


@dataclass(frozen=True)
class Utilization:
    in_use: float
    whole_pool: float
    running: float
    preemptions: int


def measure(workload: Workload, each: Callable[[Scheduler], None] = lambda scheduler: None) -> Utilization:
    """Runs the workload; ``each`` sees the scheduler whenever it is measured."""
    rng = random.Random(1)
    size = 16 // workload.scale
    limits = Limits(
        num_blocks=workload.num_blocks,
        block_size=size,
        max_model_len=min(4096, (workload.num_blocks - 1) * size),
        vocab_size=VOCAB,
        eos_ids=frozenset([2]),
        max_num_seqs=workload.places,
        max_num_batched_tokens=2560 // workload.scale,
        max_num_queued_reqs=1 << 20,
        preemption_mode=workload.preemption_mode,
        host_blocks=workload.num_blocks if workload.preemption_mode == "swap" else 0,
    )
    scheduler = Scheduler(limits, Stats(limits), scheduler_epoch=1, worker_epoch=1)
    executor = NullExecutor(
        num_blocks=limits.num_blocks,
        host_blocks=limits.host_blocks,
        block_size=size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
    )
    rid, preemptions = 0, 0
    flying: deque[Plan] = deque()
    in_use, whole_pool, running = [], [], []
    for step in range(workload.steps):
        while scheduler.load.waiting < WAITING:
            inputs, outputs = (inverse_cdf(lengths, rng.random()) for lengths in (SHAREGPT_INPUT, SHAREGPT_OUTPUT))
            if inputs + outputs < SHAREGPT_CONTEXT:
                rid += 1
                prompt = int32([rng.randrange(3, VOCAB) for _ in range(-(-inputs // workload.scale))])
                params = SamplingParams(temperature=0.0, max_tokens=max(1, outputs // workload.scale))
                scheduler.submit(b"benchmark", SubmitTokens(rid, str(rid), params, prompt))
        while (plan := scheduler.plan()) is not None:
            flying.append(plan)
        plan = flying.popleft()
        output = executor.execute(plan)
        scheduler.retire(plan.step_id, output.slots, output.ids, output.timings)
        for outbox in scheduler.streams.ready():
            done = outbox.take(scheduler.last_step).done
            preemptions += sum(one.preemptions for one in done)
            scheduler.streams.acknowledge([one.rid for one in done])
        if step >= WARM_UP * workload.steps and step % 5 == 0:
            used, filled = slots(scheduler)
            in_use.append(filled / used)
            whole_pool.append(filled / (scheduler.pool.num_usable * size))
            running.append(scheduler.load.running)
            each(scheduler)
    means = [statistics.mean(values) for values in (in_use, whole_pool, running)]
    return Utilization(*means, preemptions)


def slots(scheduler: Scheduler) -> tuple[int, int]:
    """Slots of blocks in use, and filled ones, by the metric."""
    scheduler.stats.refresh_slots(scheduler.pool.num_used, ledger.filled_slots(scheduler))
    samples = scheduler.stats.registry.snapshot()["quire:kv_slots"][3]
    by_state = {labels[0]: int(value) for labels, value in samples}
    return by_state["in_use"], by_state["filled"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--blocks", type=int, default=984)
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    print(f"{'preemption':<12} {'of blocks in use':>18} {'of the pool':>12} {'running':>8} {'preemptions':>12}")
    for mode in ("recompute", "swap"):
        found = measure(Workload(args.scale, args.blocks, args.places, args.steps, mode))
        print(
            f"{mode:<12} {found.in_use:>18.1%} {found.whole_pool:>12.1%} {found.running:>8.1f} {found.preemptions:>12}"
        )


if __name__ == "__main__":
    main()
