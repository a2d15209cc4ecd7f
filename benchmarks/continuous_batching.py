"""Six requests in three places: the scheduler's plan log beside static batching of the same six.

    python -m benchmarks.continuous_batching [--places 3] [--tokens 5 50 3 4 6 2]

The left side is what the real scheduler plans, step by step, on the null worker. The right side is what an engine does
that fills its places, waits until all of them are done, and only then fills them again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.scheduler.limits import Limits
from services.scheduler.plan_log import PlanLog
from services.scheduler.scheduler import Scheduler
from services.scheduler.stats import Stats
from services.worker.null import NullExecutor
from shared.codec import int32
from shared.sampling import SamplingParams
from shared.wire import SubmitTokens

PROMPT = [11, 12, 13, 14]
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
STANDS_EMPTY = "."


def continuous(places: int, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """The plan log of requests with these max_tokens, all submitted before the first step."""
    executor = NullExecutor(max_num_seqs=places, verify=True)
    memory = executor.memory
    limits = Limits(
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        max_model_len=memory.max_model_len,
        vocab_size=memory.vocab_size,
        eos_ids=frozenset(memory.eos_ids),
        max_num_seqs=places,
        max_num_batched_tokens=2048,
        max_num_queued_reqs=len(tokens),
    )
    scheduler = Scheduler(limits, Stats(limits), scheduler_epoch=1, worker_epoch=1)
    for rid, count in enumerate(tokens):
        params = SamplingParams(temperature=0.0, max_tokens=count)
        scheduler.submit(b"benchmark", SubmitTokens(rid, NAMES[rid], params, int32(PROMPT)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plans.jsonl"
        log = PlanLog(str(path))
        sent = []
        while True:
            while (plan := scheduler.plan()) is not None:  # one step ahead, as the server does
                log.write(plan, scheduler)
                sent.append(plan)
            if not sent:
                break
            plan = sent.pop(0)
            output = executor.execute(plan)
            scheduler.retire(plan.step_id, output.slots, output.ids, output.timings)
        log.close()
        return [json.loads(line) for line in path.read_text().splitlines()]


def static(places: int, tokens: Sequence[int]) -> list[list[str]]:
    """Who is in which place in each step when a batch is filled only once all of it is done."""
    steps = []
    for start in range(0, len(tokens), places):
        batch = list(enumerate(tokens[start : start + places], start))
        for step in range(max(count for _, count in batch)):
            row = [NAMES[rid] if step < count else STANDS_EMPTY for rid, count in batch]
            steps.append(row + [STANDS_EMPTY] * (places - len(row)))
    return steps


def places_of(plan: dict[str, Any], places: int) -> list[str]:
    """Who computes a token in which place in a step of the plan log."""
    computing = {*plan["decodes"], *(chunk[0] for chunk in plan["chunks"])}
    names = [plan["slots"].get(str(slot)) for slot in range(places)]
    return [NAMES[int(name.split("/")[0])] if name in computing else STANDS_EMPTY for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[5, 50, 3, 4, 6, 2])
    args = parser.parse_args()
    if not 1 <= len(args.tokens) <= len(NAMES):
        parser.error(f"--tokens takes 1 to {len(NAMES)} numbers, got {len(args.tokens)}")
    requests = ", ".join(f"{NAMES[rid]}={count}" for rid, count in enumerate(args.tokens))
    print(f"max_tokens: {requests}; {args.places} places; '{STANDS_EMPTY}' stands empty\n")
    ours = [places_of(plan, args.places) for plan in continuous(args.places, args.tokens)]
    theirs = static(args.places, args.tokens)
    width = max(len("continuous"), 2 * args.places) + 3
    print(f"step  {'continuous':<{width}}static")
    for step in range(max(len(ours), len(theirs))):
        left, right = (" ".join(side[step]) if step < len(side) else "" for side in (ours, theirs))
        print(f"{step + 1:>4}  {left:<{width}}{right}".rstrip())
    print()
    for name, side in (("continuous", ours), ("static", theirs)):
        busy = sum(place != STANDS_EMPTY for row in side for place in row)
        share = busy / (len(side) * args.places)
        print(f"{name:<10} {len(side):>4} steps, {busy} tokens, places busy {share:.0%} of the time")


if __name__ == "__main__":
    main()
