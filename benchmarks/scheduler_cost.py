"""What the scheduler costs: processor time of a step by part, prefix upkeep of a block, and what the allocator gives.

    python -m benchmarks.scheduler_cost [--rows 256 2048] [--steps 300]

Steps of nothing but decodes, with stop ids, metrics, block ledger and prefix cache on, as the server runs them. Results
are made up, so that only the scheduler is measured. Times are of this thread, each the least over all steps: what else
runs on the machine makes a step slower, never faster.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from services.scheduler.limits import Limits
from services.scheduler.request import Sequence
from services.scheduler.scheduler import Scheduler
from services.scheduler.stats import Stats
from shared.codec import int32
from shared.sampling import SamplingParams
from shared.wire import Plan, SubmitTokens, encode

VOCAB = 49_152
STOP_IDS = [2, 7, 11]
T = TypeVar("T")


class Parts:
    """Thread seconds of a step's parts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def timed(self, name: str, work: Callable[[], T]) -> T:
        began = time.thread_time()
        result = work()
        self.steps[-1][name] = self.steps[-1].get(name, 0.0) + time.thread_time() - began
        return result

    def least(self) -> dict[str, float]:
        """Of the step whose sum was the least."""
        return min(self.steps, key=lambda step: sum(step.values()))

    def mean(self) -> float:
        return sum(sum(step.values()) for step in self.steps) / len(self.steps)


def build(rows: int, num_blocks: int, *, tokens: int, caching: bool = True) -> Scheduler:
    limits = Limits(
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=4096,
        vocab_size=VOCAB,
        eos_ids=frozenset([2]),
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_num_queued_reqs=1 << 20,
        enable_prefix_caching=caching,
    )
    return Scheduler(limits, Stats(limits), scheduler_epoch=1, worker_epoch=1)


def submit(scheduler: Scheduler, rid: int, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=STOP_IDS)
    scheduler.submit(b"tokenizer", SubmitTokens(rid, f"req-{rid}", params, int32(prompt)))


def answer(scheduler: Scheduler, plan: Plan, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    """Retires a plan with made-up ids."""
    slots = next(step.slots for step in scheduler.steps if step.step_id == plan.step_id)
    scheduler.retire(plan.step_id, slots, ids[: len(slots)], {"total": 0.01})


def decode_cost(rows: int, steps: int) -> Parts:
    """``steps`` steps of ``rows`` decodes, one step ahead."""
    rng = np.random.default_rng(0)
    scheduler = build(rows, rows * 40, tokens=rows * 200)
    for rid in range(rows):
        submit(scheduler, rid, rng.integers(100, VOCAB, 100 + rid % 16), 4000 - 120)
    ids = rng.integers(100, VOCAB, rows).astype(np.int32)
    flying = [plan for plan in (scheduler.plan(), scheduler.plan()) if plan is not None]
    parts = Parts()
    while len(parts.steps) < steps:
        parts.steps.append({})
        done = flying.pop(0)
        parts.timed("retire", lambda done=done: answer(scheduler, done, ids))  # type: ignore[misc]
        plan = parts.timed("plan", scheduler.plan)
        assert plan is not None and plan.decodes == rows
        parts.timed("encode", lambda plan=plan: encode(plan))  # type: ignore[misc]
        flying.append(plan)
        for outbox in scheduler.streams.ready():
            encode(outbox.take(scheduler.last_step))
    return parts


def upkeep_cost(prompts: int = 40, length: int = 2048) -> tuple[float, float]:
    """Thread seconds per block of keys and publication, and of eviction, over prompts that fill the pool again."""
    rng = np.random.default_rng(1)
    scheduler = build(4, 3 * length // 16, tokens=length)
    published = evicted = 0
    spent = {"publish": 0.0, "evict": 0.0}
    tables, cache = scheduler.tables, scheduler.tables.cache

    def timing(name: str, work: Callable[..., T]) -> Callable[..., T]:
        def timed(*args: object) -> T:
            began = time.thread_time()
            try:
                return work(*args)
            finally:
                spent[name] += time.thread_time() - began

        return timed

    cache.extend_keys = timing("publish", cache.extend_keys)  # type: ignore[method-assign]
    tables.publish = timing("publish", tables.publish)  # type: ignore[method-assign]
    scheduler.pool._evict = timing("evict", scheduler.pool._evict)  # type: ignore[method-assign]
    ids = rng.integers(100, VOCAB, 8).astype(np.int32)
    for rid in range(prompts):
        submit(scheduler, rid, rng.integers(100, VOCAB, length), 1)
        before = len(cache)
        while (plan := scheduler.plan()) is not None:
            answer(scheduler, plan, ids)
            evictions = scheduler.stats.registry.snapshot()["quire:prefix_cache_evictions"][3]
        total = sum(int(sample[1]) for sample in evictions)
        published += len(cache) - before + total - evicted
        evicted = total
        for outbox in scheduler.streams.ready():
            scheduler.streams.acknowledge([done.rid for done in outbox.take(0).done])
    return spent["publish"] / published, spent["evict"] / max(evicted, 1)


def run_lengths(turnovers: int = 10, num_blocks: int = 4097) -> tuple[Counter[int], Counter[int]]:
    """Runs of consecutive blocks, in the tables of running sequences and among the free ones, after the pool was given
    out ``turnovers`` times over to requests of mixed lengths."""
    rng = random.Random(2)
    scheduler = build(64, num_blocks, tokens=8192)
    made = np.random.default_rng(3)
    ids = made.integers(100, VOCAB, 64).astype(np.int32)
    rid, given = 0, 0
    while given < turnovers * (num_blocks - 1) or scheduler.rows.num_used < 48:
        while scheduler.load.waiting < 8:
            rid += 1
            submit(scheduler, rid, made.integers(100, VOCAB, rng.randint(16, 1500)), rng.randint(1, 400))
        if (plan := scheduler.plan()) is not None:
            given += len(plan.append_blocks) + len(plan.table_blocks)
            answer(scheduler, plan, ids)
        for outbox in scheduler.streams.ready():
            scheduler.streams.acknowledge([done.rid for done in outbox.take(0).done])
    return runs(scheduler.rows.occupants()), scheduler.pool.run_lengths()


def runs(sequences: Iterable[Sequence]) -> Counter[int]:
    """How many runs of consecutive blocks there are of each length in block tables."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        length = 0
        for block, following in zip(sequence.blocks, [*sequence.blocks[1:], 0], strict=True):
            length += 1
            if following != block + 1:
                counts[length] += 1
                length = 0
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    print(f"thread milliseconds of a step of decodes, the least of {args.steps}")
    print(f"{'rows':>6} {'plan':>8} {'retire':>8} {'encode':>8} {'sum':>8} {'mean':>8}")
    for rows in args.rows:
        parts = decode_cost(rows, args.steps)
        least = parts.least()
        columns = [least["plan"], least["retire"], least["encode"], sum(least.values()), parts.mean()]
        print(f"{rows:>6} " + " ".join(f"{1000 * seconds:>8.3f}" for seconds in columns))
    publish, evict = upkeep_cost()
    print(
        f"\nprefix cache: {publish * 1e6:.2f} us per block for key and publication, {evict * 1e6:.2f} us per eviction"
    )
    tables, free = run_lengths()
    for name, counts in (("block tables", tables), ("free blocks", free)):
        blocks = sum(length * count for length, count in counts.items())
        by_block = sum(length * length * count for length, count in counts.items()) / max(blocks, 1)
        print(
            f"after ten turnovers of the pool, {name}: {blocks} blocks in {counts.total()} runs, "
            f"{blocks / max(counts.total(), 1):.1f} long on average, {by_block:.1f} as the average block sees it"
        )


if __name__ == "__main__":
    main()
