"""What the pipeline itself costs: a worker that gives tokens at once, 256 streams, CPU time of each process per token.

    python -m benchmarks.pipeline                                      one gateway, one tokenizer, and a bare SSE loop
    python -m benchmarks.pipeline --gateways 1 2 4 --tokenizers 1 2 4  tokens/s over a grid, and what bounds each

The load generator runs on the same machine; its CPU time is told apart. Answers are --output tokens long, give or take
a quarter, so that streams neither start nor end together.

With tokens at once the scheduler runs ahead of what is behind it, in many small steps. --step-ms paces the worker as a
device would (256 streams in steps of 7 ms are at most 36,571 tokens/s): steps are full then, and cost less per token.
Events per token fall below 1 when the load generator reads too slowly, and the gateway merges what it has not taken; a
token that ends inside a character has no event either.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import engines, measure, processes
from benchmarks.compare import RESULTS, machine, progress
from benchmarks.drive import Drive, Sender
from benchmarks.engines import Endpoint, Engine, EngineError
from benchmarks.load import Prompts, Request
from benchmarks.report import table
from benchmarks.stats import Spread

ROLES = ("scheduler", "tokenizer", "gateway", "worker")
CLIENT = "load generator"
FULL = 0.9  # a core, or the machine, is in use to this share: it is what bounds


@dataclass(frozen=True)
class Usage:
    """CPU of one process (or of all of one role) over a run: seconds of CPU by second, and microseconds per token."""

    busy: float
    us_per_token: float


@dataclass(frozen=True)
class Run:
    """One run. usage: by process name ("gateway 0"), the load generator's under its own."""

    gateways: int
    tokenizers: int
    tokens_per_s: float
    events_per_token: float
    seconds: float
    usage: dict[str, Usage]
    others_share: float
    faults: list[str]

    def role(self, role: str) -> Usage:
        of_role = [usage for name, usage in self.usage.items() if role_of(name) == role]
        return Usage(sum(one.busy for one in of_role), sum(one.us_per_token for one in of_role))


def role_of(name: str) -> str:
    return CLIENT if name == CLIENT else name.split()[0]


def bound(busy: Mapping[str, float], cores: int) -> str:
    """What holds a run back. busy: cores used by each process, each of which runs on one thread for the most part."""
    full = [name for name, share in busy.items() if share >= FULL]
    if full:
        return f"{', '.join(full)}: a core each" if len(full) > 1 else f"{full[0]}: a whole core"
    total = sum(busy.values())
    roles: dict[str, float] = {}
    for name, share in busy.items():
        roles[role_of(name)] = roles.get(role_of(name), 0.0) + share
    most = max(roles, key=lambda role: roles[role])
    if total >= FULL * cores:
        return f"all {cores} cores, {most} the most ({roles[most] / total:.0%})"
    return f"waiting: {total:.1f} of {cores} cores in use"


def names(pids: Sequence[int]) -> dict[int, str]:
    """ "role index" of the server's processes; the launcher, which only watches, is among them."""
    found: dict[int, str] = {}
    for pid in sorted(pids):
        try:
            words = (processes.PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        role = next((words[place + 1] for place, word in enumerate(words[:-1]) if _is_quire(word)), "server")
        found[pid] = f"{role} {sum(role_of(name) == role for name in found.values())}"
    return found


def _is_quire(word: str) -> bool:
    return Path(word).name in ("quire", "services.cli")


def requests(options: argparse.Namespace, seed: str, count: int) -> list[Request]:
    rng = random.Random(seed)
    prompts = Prompts(rng)
    spread = options.output // 4
    return [
        prompts.request(options.input, rng.randint(options.output - spread, options.output + spread))
        for _ in range(count)
    ]


async def measured(endpoint: Endpoint, options: argparse.Namespace, seed: str) -> tuple[Drive, dict[str, float], float]:
    """The drive, the CPU seconds of each process during it, and the share of the machine that others used."""
    assert endpoint.pid is not None
    wanted = requests(options, seed, options.requests or 8 * options.streams)
    named = names(processes.tree(endpoint.pid))
    meter = processes.Meter(list(named))
    drive = await Sender(endpoint, options.timeout).closed(wanted, options.streams)
    used = {named[pid]: cpu for pid, cpu in meter.used().items()}
    return drive, {**used, CLIENT: drive.cpu}, meter.others_share()


def run_of(gateways: int, tokenizers: int, drive: Drive, cpu: Mapping[str, float], others: float) -> Run:
    tokens = max(1, drive.tokens)
    return Run(
        gateways=gateways,
        tokenizers=tokenizers,
        tokens_per_s=drive.tokens / drive.seconds,
        events_per_token=sum(len(answer.times) for answer in drive.answers) / tokens,
        seconds=drive.seconds,
        usage={name: Usage(used / drive.seconds, used / tokens * 1e6) for name, used in cpu.items()},
        others_share=others,
        faults=measure.faults(drive.answers),
    )


async def pipeline(options: argparse.Namespace, gateways: int, tokenizers: int, logs: Path) -> list[Run]:
    blocks = 2 + options.streams * (1 + (options.input + options.output * 5 // 4) // 16)
    args = f"--worker null --gateways {gateways} --tokenizers {tokenizers} --max-num-seqs {options.streams}"
    args += f" --null-step-ms {options.step_ms:g} --num-gpu-blocks-override {blocks} {options.args}"
    engine = engines.quire(f"quire-{gateways}x{tokenizers}", args)
    return await runs_of(engine, options, gateways, tokenizers, logs)


async def runs_of(engine: Engine, options: argparse.Namespace, gateways: int, tokenizers: int, logs: Path) -> list[Run]:
    runs = []
    async with engines.serving(engine, logs) as endpoint:
        await Sender(endpoint, options.timeout).closed(requests(options, "warm-up", options.streams), options.streams)
        for index in range(options.rounds):
            run = run_of(gateways, tokenizers, *await measured(endpoint, options, f"{options.seed}/{index}"))
            runs.append(run)
            progress(f"{engine.name}, round {index + 1}: {run.tokens_per_s:.0f} tokens/s in {run.seconds:.1f} s")
            for fault in run.faults[:3]:
                progress(f"  {fault}")
    return runs


def single_table(runs: Sequence[Run], bare: Sequence[Run]) -> str:
    """Medians of one set-up: each role's CPU, and the bare loop's beside it."""
    lines = [(role, runs, role) for role in (*ROLES, CLIENT)] + [("launcher", runs, "serve")]
    if bare:
        lines += [("bare SSE loop", bare, "server"), ("its load generator", bare, CLIENT)]
    rows = []
    for title, some, role in lines:
        per_token = Spread.of([run.role(role).us_per_token for run in some])
        busy = Spread.of([run.role(role).busy for run in some])
        cell = f"{per_token.median:.1f} ({per_token.low:.1f}-{per_token.high:.1f})"
        rows.append([title, cell, f"{busy.median:.2f}"])
    return table(["process", "µs of CPU per token", "cores in use"], rows)


def grid_table(runs: Sequence[Run], cores: int) -> str:
    rows = []
    for run in runs:
        per_token = [f"{run.role(role).us_per_token:.1f}" for role in (*ROLES, CLIENT)]
        held = bound({name: usage.busy for name, usage in run.usage.items()}, cores)
        head = [str(run.gateways), str(run.tokenizers), f"{run.tokens_per_s:.0f}", f"{run.events_per_token:.3f}"]
        rows.append([*head, *per_token, held])
    titles = [*(f"{role} µs" for role in ROLES), "client µs", "bound by"]
    return table(["gateways", "tokenizers", "tokens/s", "events/token", *titles], rows)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gateways", type=int, nargs="+", default=[1])
    add("--tokenizers", type=int, nargs="+", default=[1])
    add("--streams", type=int, default=256, help="at a time")
    add("--requests", type=int, default=0, help="per round; default: eight for each stream")
    add("--input", type=int, default=32, help="prompt tokens")
    add("--output", type=int, default=128, help="mean output tokens")
    add("--rounds", type=int, default=3)
    add("--step-ms", type=float, default=0.0, help="a step of the null worker takes this long; 0: tokens at once")
    add("--args", default="", help="further arguments of quire serve")
    add("--no-bare", action="store_true", help="without the bare SSE loop")
    add("--timeout", type=float, default=120.0, help="seconds one answer may take")
    add("--seed", type=int, default=7)
    add("--json", type=Path, help="where the results go; default: benchmarks/results/pipeline-TIME.json")
    return parser.parse_args(argv)


async def run_all(options: argparse.Namespace, logs: Path) -> tuple[list[list[Run]], list[Run]]:
    """The runs of each set-up, and those of the bare loop, which is measured beside a single set-up only."""
    pairs = [(gateways, tokenizers) for gateways in options.gateways for tokenizers in options.tokenizers]
    found = [await pipeline(options, *pair, logs) for pair in pairs]
    if options.no_bare or len(pairs) > 1:
        return found, []
    command = f"{sys.executable} -m benchmarks.bare_sse --port {{port}}"
    return found, await runs_of(Engine("bare", start=command, health="/v1/models"), options, 0, 0, logs)


def main() -> int:
    options = parse()
    started = time.strftime("%Y%m%d-%H%M%S")
    logs = Path(tempfile.mkdtemp(prefix="quire-pipeline-"))
    try:
        found, bare = engines.run(run_all(options, logs))
    except (EngineError, OSError) as error:
        print(f"pipeline: {error}\nlogs: {logs}", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0))
    medians = [sorted(runs, key=lambda run: run.tokens_per_s)[len(runs) // 2] for runs in found]
    everything = [run for runs in [*found, bare] for run in runs]
    target = options.json or RESULTS / f"pipeline-{started}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    plain = {"command": sys.argv, "machine": machine(), "runs": [asdict(run) for run in everything]}
    target.write_text(json.dumps(plain, indent=1))
    print(
        f"\n{options.streams} streams, {options.input} tokens in, {options.output} out, {cores} cores; median rounds\n"
    )
    print(grid_table(medians, cores))
    if len(found) == 1:
        print(f"\n{single_table(found[0], bare)}")
    for run in bare[:1]:
        rates = Spread.of([one.tokens_per_s for one in bare])
        print(f"\nbare SSE loop: {rates.median:.0f} events/s, {run.events_per_token:.3f} events per token")
    busiest = max(run.others_share for run in everything)
    print(f"\nresults: {target}; logs: {logs}\nother processes used at most {busiest:.0%} of the machine in a round")
    return 1 if any(run.faults for run in everything) else 0


if __name__ == "__main__":
    sys.exit(main())
