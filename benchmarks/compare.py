"""Quire beside other engines: the same load on each, in interleaved rounds, and one table of ratios.

    python -m benchmarks.compare --load fixed:1 fixed:8 fixed:32 --peers peers.toml --only vllm

Loads:
    fixed:N      prompts of --input and answers of --output tokens, N at a time
    sharegpt:N   lengths drawn from ShareGPT's quantiles, N at a time
    prefix:N     512 common and 32 own prompt tokens, 16 output tokens, N at a time; the common part is new each round
    long:N       N streams, among which prompts of --long-input tokens arrive
    trace:RATE   lengths of --trace, RATE requests a second, Poisson

Engines are this tree's own server, once for each --quire NAME=ARGS (the first is what the others are compared with),
and the tables of a TOML file (--peers; peers.example.toml shows all keys). All servers stay up, and rounds alternate
between them; with --one-at-a-time each is started for its round and ended after it. An engine with 'run' instead of
'start' is a command that measures in its own process, started for every round. In its words {file} is a JSON file
{"concurrency", "requests": [{"prompt": [ids], "max_tokens"}]}, and {concurrency} {requests} {input} {output} are the
load's numbers (lengths as means). It prints one JSON line with "output_tokens_per_s", and "ttft_s", "tpot_s" and "ids"
(one per request each) if it knows them.

Every answer is checked: number of tokens, finish reason, some output. The ids of a first, unmeasured round are compared
with the first engine's, where an engine gives them: "same ids" is the share of tokens before the first difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import engines, measure, processes
from benchmarks.answers import same_ids
from benchmarks.drive import Sender
from benchmarks.engines import Endpoint, Engine, EngineError
from benchmarks.load import Prompts, Request, TraceRow, read_trace, seeded, sharegpt_lengths, trace_requests
from benchmarks.measure import GENERAL, LONG, Result
from benchmarks.report import Report
from benchmarks.stats import in_turn

RESULTS = Path(__file__).parent / "results"
PREFIX_COMMON, PREFIX_OWN, PREFIX_OUTPUT = 512, 32, 16
LONG_STREAM_INPUT, LONG_STREAM_OUTPUT, LONG_OUTPUT, LONG_MOST = 128, 512, 8, 8
WARM_UP = -1  # the unmeasured round's number
WARM_UP_REQUESTS, WARM_UP_OUTPUT = 16, 64


@dataclass(frozen=True)
class Load:
    """What is sent in a round. level: requests at a time, or a second for a trace."""

    kind: str
    level: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.level:g}"

    @classmethod
    def parse(cls, text: str) -> Load:
        kind, _, level = text.partition(":")
        try:
            load = cls(kind, float(level) if kind == "trace" else int(level))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: a load is KIND:NUMBER") from None
        if kind not in ("fixed", "sharegpt", "prefix", "long", "trace") or load.level <= 0:
            raise argparse.ArgumentTypeError(f"{text!r}: fixed, sharegpt, prefix, long or trace, and a number above 0")
        return load

    @property
    def metrics(self) -> tuple[str, ...]:
        if self.kind == "long":
            return (*LONG, "memory")
        return (*GENERAL, "hit_rate", "memory") if self.kind == "prefix" else (*GENERAL, "memory")

    @property
    def usual_requests(self) -> int:
        level = int(self.level)
        if self.kind == "fixed":
            return 6 if level == 1 else max(24, 2 * level)
        return {"sharegpt": max(12, level * 3 // 2), "prefix": max(64, 4 * level), "long": level}.get(self.kind, 64)


class Comparison:
    """Runs the rounds. Engines that run commands of their own are driven through files, all others over HTTP."""

    def __init__(self, options: argparse.Namespace, chosen: Sequence[Engine], trace: list[TraceRow]) -> None:
        self._options, self._engines, self._trace = options, {one.name: one for one in chosen}, trace
        self._loads: list[Load] = options.load
        self._up: dict[str, Endpoint] = {}
        self.report = Report(
            [one.name for one in chosen], [str(load) for load in self._loads], {str(x): x.metrics for x in self._loads}
        )

    async def run(self, logs: Path) -> None:
        options = self._options
        async with AsyncExitStack() as stack:
            if not options.one_at_a_time:
                for engine in self._engines.values():
                    if not engine.run:
                        progress(f"starting {engine.name}")
                        self._up[engine.name] = await stack.enter_async_context(engines.serving(engine, logs))
            for load in self._loads:
                await self._warm_up(load, logs)
                for round_index in range(options.rounds):
                    for name in in_turn(list(self._engines), round_index):
                        result = await self._round(self._engines[name], load, round_index, logs)
                        self.report.add(result)
                        progress(_line(result))
                        for fault in result.faults[:3]:
                            progress(f"  {fault}")

    async def _warm_up(self, load: Load, logs: Path) -> None:
        base: list[list[int]] = []
        for name, engine in self._engines.items():
            result = await self._round(engine, load, WARM_UP, logs)
            if not base:
                base = result.ids
            else:
                count = min(len(base), len(result.ids))
                self.report.add_same_ids(str(load), name, same_ids(base[:count], result.ids[:count]))
            progress(f"{load}, warm-up, {name}: {len(result.faults)} wrong answers")
            for fault in result.faults[:3]:
                progress(f"  {fault}")

    async def _round(self, engine: Engine, load: Load, index: int, logs: Path) -> Result:
        requests = self._requests(load, index)
        concurrency = engine.concurrency or int(load.level)
        if index == WARM_UP and load.kind != "long":
            few = requests[: min(WARM_UP_REQUESTS, math.ceil(load.level))]
            requests = [replace(one, max_tokens=min(one.max_tokens, WARM_UP_OUTPUT), at=0.0) for one in few]
        if engine.requests:
            requests = requests[: engine.requests]
        await processes.rest(self._options.rest)
        if engine.run:
            return await self._round_in_process(engine, load, index, requests, concurrency, logs)
        async with self._endpoint(engine, logs) as endpoint:
            return await self._round_over_http(endpoint, load, index, requests, concurrency)

    @asynccontextmanager
    async def _endpoint(self, engine: Engine, logs: Path) -> AsyncIterator[Endpoint]:
        if engine.name in self._up:
            yield self._up[engine.name]
            return
        async with engines.serving(engine, logs) as endpoint:
            if self._options.one_at_a_time:  # nothing before the round has warmed it
                prompts = self._prompts(seeded(self._options.seed, "start", 0))
                await Sender(endpoint, self._options.timeout).closed([prompts.request(64, 4) for _ in range(8)], 4)
            yield endpoint

    async def _round_over_http(
        self, endpoint: Endpoint, load: Load, index: int, requests: list[Request], concurrency: int
    ) -> Result:
        sender = Sender(endpoint, self._options.timeout, ids=index == WARM_UP)
        meter = processes.Meter(processes.tree(endpoint.pid) if endpoint.pid else [])
        async with processes.watched_memory(endpoint.pid) as peak:
            if load.kind == "long":
                drive = await sender.streams_with_long(requests, self._long_requests(index), LONG_STREAM_OUTPUT // 3)
                metrics = measure.long_prompt(drive, len(requests))
            elif load.kind == "trace":
                drive = await sender.open(requests)
                metrics = measure.general(drive)
            else:
                drive = await sender.closed(requests, concurrency)
                metrics = measure.general(drive) | {"hit_rate": measure.hit_rate(drive.answers)}
        return Result(
            engine=endpoint.engine.name,
            load=str(load),
            round=index,
            metrics=metrics | {"memory": peak.bytes.get("anon", math.nan)},
            requests=len(drive.answers),
            tokens=drive.tokens,
            seconds=drive.seconds,
            faults=measure.faults(drive.answers),
            memory=peak.bytes,
            engine_cpu_s=sum(meter.used().values()),
            client_cpu_s=drive.cpu,
            others_share=meter.others_share(),
            ids=[answer.ids for answer in drive.answers],
        )

    async def _round_in_process(
        self, engine: Engine, load: Load, index: int, requests: list[Request], concurrency: int, logs: Path
    ) -> Result:
        if load.kind in ("long", "trace"):
            raise EngineError(f"{engine.name}: a load of arrivals in time, {load}, cannot be given to a command")
        wanted = [{"prompt": one.prompt, "max_tokens": one.max_tokens} for one in requests]
        output = sum(one.max_tokens for one in requests)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"concurrency": concurrency, "requests": wanted}, file)
            file.flush()
            numbers = {
                "file": shlex.quote(file.name),
                "concurrency": concurrency,
                "requests": len(requests),
                "input": round(sum(one.prompt_tokens for one in requests) / len(requests)),
                "output": round(output / len(requests)),
            }
            command = engine.run
            for name, value in numbers.items():
                command = command.replace(f"{{{name}}}", str(value))
            log = logs / f"{engine.name}.log"
            async with (
                engines.process(engine, command, log, asyncio.subprocess.PIPE) as started,
                processes.watched_memory(started.pid) as peak,
            ):
                told = await _json_line(engine, started, log, self._options.timeout)
        figures = measure.latencies(told.get("ttft_s", []), told.get("tpot_s", []))
        rate = float(told["output_tokens_per_s"])
        ids: list[list[int]] = told.get("ids", [])
        faults = [
            f"request {place}: {len(one)} output tokens, {request.max_tokens} asked for"
            for place, (one, request) in enumerate(zip(ids, requests, strict=False))
            if len(one) != request.max_tokens
        ]
        return Result(
            engine=engine.name,
            load=str(load),
            round=index,
            metrics={"tokens_per_s": rate, **figures, "memory": peak.bytes.get("anon", math.nan)},
            requests=len(requests),
            tokens=output,
            seconds=output / rate,
            faults=faults,
            memory=peak.bytes,
            ids=ids,
        )

    def _requests(self, load: Load, index: int) -> list[Request]:
        options = self._options
        rng = seeded(options.seed, str(load), index)
        prompts = self._prompts(rng)
        count = options.requests or load.usual_requests
        if load.kind == "sharegpt":
            return [prompts.request(*pair) for pair in sharegpt_lengths(rng, count)]
        if load.kind == "prefix":
            common = prompts.ids(PREFIX_COMMON)
            return [prompts.request(PREFIX_OWN, PREFIX_OUTPUT, common=common) for _ in range(count)]
        if load.kind == "long":
            return [prompts.request(LONG_STREAM_INPUT, LONG_STREAM_OUTPUT) for _ in range(int(load.level))]
        if load.kind == "trace":
            return trace_requests(
                self._trace,
                prompts,
                rng,
                count=count,
                first=(index - WARM_UP) * count,
                rate=load.level,
                max_model_len=options.max_model_len,
                own_times=options.arrivals == "trace",
            )
        return [prompts.request(options.input, options.output) for _ in range(count)]

    def _prompts(self, rng: random.Random) -> Prompts:
        low, high = self._options.vocab
        return Prompts(rng, low, high, words=self._options.prompts == "words")

    def _long_requests(self, index: int) -> list[Request]:
        options = self._options
        prompts = self._prompts(seeded(options.seed, "long prompts", index))
        return [prompts.request(options.long_input, LONG_OUTPUT) for _ in range(LONG_MOST)]


async def _json_line(engine: Engine, started: asyncio.subprocess.Process, log: Path, timeout: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(engine.start_timeout + timeout):
            output, _ = await started.communicate()
    except TimeoutError:
        raise EngineError(f"{engine.name} did not end within {engine.start_timeout + timeout:g} s") from None
    lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith("{")]
    if started.returncode != 0 or not lines:
        code = started.returncode
        raise EngineError(f"{engine.name} ended with code {code} and {len(lines)} JSON lines:\n{engines.tail(log)}")
    told = json.loads(lines[-1])
    if not isinstance(told.get("output_tokens_per_s"), int | float):
        raise EngineError(f"{engine.name}: its line has no number 'output_tokens_per_s': {lines[-1][:300]}")
    return dict(told)


def _line(result: Result) -> str:
    client = result.client_cpu_s / result.seconds
    shares = "" if math.isnan(client) else f", client {client:.0%} of a core, others {result.others_share:.0%}"
    return (
        f"{result.load}, round {result.round + 1}, {result.engine}: {result.metrics['tokens_per_s']:.1f} tokens/s, "
        f"{result.tokens} tokens in {result.seconds:.1f} s{shares}"
    )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _named(text: str) -> tuple[str, str]:
    name, found, args = text.partition("=")
    if not found or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ARGS")
    return name, args


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--load", type=Load.parse, nargs="+", default=[Load("fixed", 8)], metavar="KIND:N", help="see above")
    add("--quire", type=_named, action="append", metavar="NAME=ARGS", help="this server with ARGS; default: 'quire='")
    add("--peers", type=Path, help="TOML file of engines")
    add("--only", nargs="+", default=[], metavar="NAME", help="of the file's engines, these")
    add("--one-at-a-time", action="store_true", help="start each server for its round, end it after")
    add("--rounds", type=int, default=3)
    add("--requests", type=int, default=0, help="per round; default: as many as the load needs")
    add("--input", type=int, default=128, help="tokens of a fixed load's prompts")
    add("--output", type=int, default=64, help="tokens of a fixed load's answers")
    add("--long-input", type=int, default=4096, help="tokens of the prompts that arrive among streams")
    add("--trace", type=Path, help="Azure's LLM inference trace (.csv) or Mooncake's (.jsonl)")
    add("--arrivals", choices=("poisson", "trace"), default="poisson", help="'trace': its own times, stretched")
    add("--max-model-len", type=int, default=2048, help="rows of the trace that need more are passed over")
    add("--prompts", choices=("ids", "words"), default="ids", help="'words' for endpoints that take text only")
    add("--vocab", type=int, nargs=2, default=[100, 40_000], metavar=("LOW", "HIGH"), help="range of the prompts' ids")
    add("--timeout", type=float, default=600.0, help="seconds one answer may take")
    add("--rest", type=float, default=10.0, help="seconds a round waits at most until other processes use little CPU")
    add("--seed", type=int, default=7)
    add("--json", type=Path, help="where the results go; default: benchmarks/results/compare-TIME.json")
    options = parser.parse_args(argv)
    if any(load.kind == "trace" for load in options.load) and options.trace is None:
        parser.error("a trace load needs --trace FILE")
    if options.rounds < 1 or options.requests < 0:
        parser.error("--rounds is at least 1, --requests not negative")
    return options


def chosen_engines(options: argparse.Namespace) -> list[Engine]:
    peers = engines.from_file(options.peers) if options.peers else []
    names = [one.name for one in peers]
    for name in options.only:
        if name not in names:
            raise EngineError(f"--only {name}: the engines are {', '.join(names) or 'none (no --peers)'}")
    ours = [engines.quire(name, args) for name, args in options.quire or [("quire", "")]]
    found = [*ours, *(one for one in peers if not options.only or one.name in options.only)]
    if len({one.name for one in found}) != len(found):
        raise EngineError(f"two engines have one name: {', '.join(one.name for one in found)}")
    return found


def machine() -> dict[str, Any]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.processor()
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}


def main() -> int:
    options = parse()
    started = time.strftime("%Y%m%d-%H%M%S")
    logs = Path(tempfile.mkdtemp(prefix="quire-compare-"))
    try:
        chosen = chosen_engines(options)
        comparison = Comparison(options, chosen, read_trace(options.trace) if options.trace else [])
    except (EngineError, OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    report, failed = comparison.report, False
    try:
        engines.run(comparison.run(logs))
    except (EngineError, OSError, ValueError) as error:
        print(f"compare: {error}\nlogs: {logs}", file=sys.stderr)
        failed = True
    if not report.results:
        return 2
    target = options.json or RESULTS / f"compare-{started}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "command": sys.argv,
        "started": started,
        "machine": machine(),
        "engines": [{"name": one.name, "start": one.start, "run": one.run} for one in chosen],
        "rounds": [result.plain() for result in report.results],
    }
    target.write_text(json.dumps(results, indent=1))
    print(f"\nmedians over {options.rounds} interleaved rounds, in brackets least and greatest")
    if len(chosen) > 1:
        print(f"\n{report.ratios()}")
    print(f"\n{report.values()}\n\nresults: {target}; logs: {logs}")
    busiest = max((one.others_share for one in report.results if not math.isnan(one.others_share)), default=0.0)
    print(f"other processes used at most {busiest:.0%} of the machine in a round")
    if failed:
        return 2
    return 1 if any(result.faults for result in report.results) else 0


if __name__ == "__main__":
    sys.exit(main())
