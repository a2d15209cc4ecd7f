"""What sampling costs: batches of requests that sample, beside the same batch when all of it is greedy, over HTTP.

    python -m benchmarks.sampling [--requests 64] [--tokens 64] [--rounds 3] [--model MODEL] [-- SERVER OPTIONS]

Each round runs every kind of batch once, so that a machine that drifts slows all of them alike. A ratio is of a kind's
tokens/s to the greedy batch of its own round; the median of the rounds is shown, and the least and the greatest.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from services.offline.client import Address, Client
from services.offline.server import PrivateServer

PROMPT_TOKENS = 32
GREEDY: dict[str, Any] = {"temperature": 0}
FILTERED: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.7, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.1, "min_p": 0.05},
]
PENALIZED: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.1},
    {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
]
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY],
    "temperature": [{"temperature": 1.0}],
    "top-p, top-k, min-p": FILTERED,
    "penalties": PENALIZED,
    "all mixed": [
        GREEDY,
        *FILTERED,
        *PENALIZED,
        {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    ],
}


async def batch(client: Client, kind: list[dict[str, Any]], requests: int, tokens: int, seed: int) -> float:
    """Tokens/s of ``requests`` that are sent together, each with the next of the kind's parameters. A seed of its own
    keeps a batch's prompts out of the prefix cache."""
    rng = random.Random(seed)
    bodies = [
        {
            "prompt": [rng.randrange(1000, 30_000) for _ in range(PROMPT_TOKENS)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": seed + place,
            **kind[place % len(kind)],
        }
        for place in range(requests)
    ]
    begin = time.perf_counter()
    answers = await asyncio.gather(*(client.post("/v1/completions", body) for body in bodies))
    took = time.perf_counter() - begin
    for answer in answers:
        if answer.status != 200 or answer.body["usage"]["completion_tokens"] != tokens:
            raise SystemExit(f"a wrong answer: {answer.status} {str(answer.body)[:500]}")
    return requests * tokens / took


async def measure(address: Address, requests: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens/s by kind, one figure for each round."""
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    async with Client(address, requests) as client:
        for kind in KINDS.values():  # unmeasured
            await batch(client, kind, requests, min(tokens, 4), 1)
        for round_ in range(rounds):
            for place, (name, kind) in enumerate(KINDS.items()):
                seed = requests * (1 + round_ * len(KINDS) + place)
                rate = await batch(client, kind, requests, tokens, seed)
                found[name].append(rate)
                print(f"round {round_ + 1}: {name}: {rate:.0f} tokens/s", file=sys.stderr)
    return found


def table(found: dict[str, list[float]]) -> str:
    lines = ["| batch | tokens/s | of greedy | |", "|---|---|---|---|"]
    for name, rates in found.items():
        ratios = [rate / greedy for rate, greedy in zip(rates, found["greedy"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| {name} | {statistics.median(rates):.0f} | {statistics.median(ratios):.2f} | {spread} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="", help="default: the built-in one")
    parser.add_argument("server", nargs="*", help="options of quire serve, after --")
    args = parser.parse_args(argv)
    server = PrivateServer([*([args.model] if args.model else []), *args.server])
    try:
        server.wait_ready()
        found = asyncio.run(measure(Address("http://quire", server.uds), args.requests, args.tokens, args.rounds))
    finally:
        server.close()
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
