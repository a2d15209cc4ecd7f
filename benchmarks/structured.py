"""What structured output costs: batches that are held to JSON Schemas, beside the same batch without, over HTTP.

    python -m benchmarks.structured [--requests 32] [--tokens 64] [--rounds 3] [--quire "SERVER OPTIONS"]

``strings``: a schema that leaves nearly every token a choice, so it shows what masks cost. ``records``: one whose keys
are given, so it shows what runs that come as one chunk save as well. All requests give the same number of tokens, and
each schema is another one, compiled before it is measured; what compiling costs is told apart: the first answer of a
schema beside its second, one token each. Each round runs every kind once, so that a machine that drifts slows all of
them alike; ratios are to the plain batch of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.client import Connection, Recording, post_bytes, read
from benchmarks.engines import Endpoint, EngineError, quire, run, serving

PROMPT_TOKENS = 32
TIMEOUT = 300.0
ENDLESS = 10_000  # items that an array has at least, so that no answer ends before its tokens are used up
KINDS = ("plain", "strings", "records")


def schema(kind: str, place: int) -> dict[str, Any]:
    """The ``place``-th schema of a kind."""
    if kind == "strings":
        items: dict[str, Any] = {"type": "string", "minLength": 30 + place}
    else:
        names = [f"{name}_{place}" for name in ("identifier", "description", "number_of_parts", "is_available")]
        values = [{"type": "integer"}, {"type": "string"}, {"type": "integer"}, {"type": "boolean"}]
        items = {
            "type": "object",
            "properties": dict(zip(names, values, strict=True)),
            "required": names,
            "additionalProperties": False,
        }
    return {"type": "array", "items": items, "minItems": ENDLESS}


def body(kind: str, place: int, tokens: int, rng: random.Random) -> bytes:
    wish = {} if kind == "plain" else {"structured_outputs": {"json": schema(kind, place)}}
    prompt = [rng.randrange(1000, 30_000) for _ in range(PROMPT_TOKENS)]
    fields = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **wish}
    return orjson.dumps(fields)


class Bench:
    """Connections to one server, kept from batch to batch."""

    def __init__(self, endpoint: Endpoint, connections: list[Connection]) -> None:
        self._url, self._connections = endpoint.url, connections

    async def batch(self, bodies: Sequence[bytes], tokens: int) -> float:
        """Seconds until all of these, sent together, are answered with ``tokens`` tokens each."""
        begin = time.perf_counter()
        recordings = await asyncio.gather(*map(self._post, self._connections, bodies))
        seconds = time.perf_counter() - begin
        for recording in recordings:
            answer = read(recording)
            found = orjson.loads(answer.body) if answer.status == 200 else {}
            if found.get("usage", {}).get("completion_tokens") != tokens:
                raise EngineError(f"a wrong answer: {answer.status} {answer.body[:500]!r}")
        return seconds

    async def _post(self, connection: Connection, content: bytes) -> Recording:
        recording = Recording()
        await connection.post(post_bytes(self._url, "/v1/completions", content), recording, TIMEOUT)
        if recording.error:
            raise EngineError(recording.error)
        return recording


async def compile_costs(bench: Bench, kind: str, requests: int, rng: random.Random) -> list[float]:
    """Seconds by which the first answer of each schema takes longer than its second."""
    await bench.batch([body(kind, requests, 1, rng)], 1)  # loads the vocabulary, if nobody has
    costs = []
    for place in range(requests):
        first = await bench.batch([body(kind, place, 1, rng)], 1)
        costs.append(first - await bench.batch([body(kind, place, 1, rng)], 1))
    return costs


async def measure(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens/s by kind, one figure a round; and compile costs by kind."""
    rng, rates, costs = random.Random(1), dict[str, list[float]](), dict[str, list[float]]()
    engine = quire("quire", f"--max-num-seqs {options.requests} {options.quire}")
    with tempfile.TemporaryDirectory() as logs:
        async with serving(engine, Path(logs)) as endpoint:
            connections = [await Connection.open(endpoint.url) for _ in range(options.requests)]
            bench = Bench(endpoint, connections)
            for kind in KINDS[1:]:
                costs[kind] = await compile_costs(bench, kind, options.requests, rng)
            for round_ in range(-1, options.rounds):  # the first is not measured
                for kind in KINDS:
                    bodies = [body(kind, place, options.tokens, rng) for place in range(options.requests)]
                    rate = options.requests * options.tokens / await bench.batch(bodies, options.tokens)
                    if round_ >= 0:
                        rates.setdefault(kind, []).append(rate)
                        print(f"round {round_ + 1}: {kind}: {rate:.0f} tokens/s", file=sys.stderr)
            for connection in connections:
                connection.close()
    return rates, costs


def table(rates: dict[str, list[float]], costs: dict[str, list[float]]) -> str:
    lines = ["| batch | tokens/s | of plain | | compile ms, median | longest |", "|---|---|---|---|---|---|"]
    for kind, found in rates.items():
        ratios = [rate / plain for rate, plain in zip(found, rates["plain"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        cost = [1000 * seconds for seconds in costs.get(kind, [])]
        compiled = f"{statistics.median(cost):.1f} | {max(cost):.1f}" if cost else "|"
        lines.append(
            f"| {kind} | {statistics.median(found):.0f} | {statistics.median(ratios):.2f} | {spread} | {compiled} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=32, help="at once")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quire", default="", help="options of quire serve, as one word")
    options = parser.parse_args(argv)
    try:
        print(table(*run(measure(options))))
    except EngineError as error:
        print(f"structured: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
