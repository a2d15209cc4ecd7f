"""HEALTHCHECK of the image, for whichever Quire process the container runs.

It reads that process's own command line and environment, so it follows ``--host`` and ``--port`` however they were
given. What counts as healthy:

gateway, serve      ``/ready`` answers 200 where the process listens
scheduler           its loop answers a message from a stranger, namely with HELLO_REQUIRED
tokenizer, worker   it is not stopped and holds a connection to the scheduler. Whether it makes progress is the
                    scheduler's to judge, by heartbeats, and shows in the gateways' ``/ready``.

Usage: healthcheck.py [PID], by default the container's first Quire process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from probe import probe

from services.gateway.config import GatewayConfig
from services.launcher.config import LauncherConfig
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig
from shared import options
from shared.config import parse_many
from shared.errors import ConfigError
from shared.ids import Identity
from shared.transport import Endpoint, connect_dealer
from shared.wire import Heartbeat, HelloRequired, decode, encode

ANSWER_MS = 3000
# The config that tells where each process is, and all whose options its command line may carry.
OPTIONS: dict[str, tuple[type[Any], list[type[Any]]]] = {
    "serve": (GatewayConfig, [LauncherConfig, GatewayConfig, TokenizerConfig, SchedulerConfig, WorkerConfig]),
    "gateway": (GatewayConfig, [GatewayConfig]),
    "tokenizer": (TokenizerConfig, [TokenizerConfig]),
    "scheduler": (SchedulerConfig, [SchedulerConfig]),
    "worker": (WorkerConfig, [WorkerConfig]),
}


@dataclass(frozen=True)
class Process:
    """A running ``quire ROLE …``; ``state`` is the kernel's letter (R, S, D, T, Z …)."""

    pid: int
    role: str
    argv: list[str]
    env: dict[str, str]
    state: str

    @property
    def config(self) -> Any:
        wanted, classes = OPTIONS[self.role]
        configs = parse_many(classes, self.argv, self.env, prog=f"quire {self.role}", about="")
        return next(config for config in configs if isinstance(config, wanted))


def find() -> Process | None:
    """The container's oldest Quire process: ``quire serve`` comes before its children."""
    pids = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return next((process for pid in pids if (process := read(pid)) is not None), None)


def read(pid: int) -> Process | None:
    """None when ``pid`` is gone or something else."""
    folder = Path("/proc") / str(pid)
    try:
        argv = (folder / "cmdline").read_bytes().decode().split("\0")[:-1]
        # An init's command line has the same words, but no Python in front.
        if (
            len(argv) < 3
            or "python" not in Path(argv[0]).name
            or Path(argv[1]).name != "quire"
            or argv[2] not in CHECKS
        ):
            return None
        pairs = (folder / "environ").read_bytes().decode().split("\0")
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(pid, argv[2], argv[3:], dict(pair.split("=", 1) for pair in pairs if "=" in pair), state)


def check_http(process: Process) -> str:
    host, port = process.config.host, process.config.port
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return probe(f"http://{f'[{host}]' if ':' in host else host}:{port}/ready")


def check_scheduler(process: Process) -> str:
    config = process.config
    address = Endpoint(config.bind).clients.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    with zmq.Context() as context:
        stranger = Identity.fresh("tokenizer", 0).encode()
        with connect_dealer(context, stranger, address, options.security(config)) as dealer:
            dealer.send_multipart(encode(Heartbeat(epoch=1, progress=0, lag=0.0)))
            if not dealer.poll(ANSWER_MS):
                return f"{address}: no answer within {ANSWER_MS} ms"
            answer = decode(dealer.recv_multipart())
    return "" if isinstance(answer, HelloRequired) else f"{address}: answered with {type(answer).__name__}"


def check_peer(process: Process) -> str:
    if process.state in "TtZX":
        return f"process {process.pid} is stopped or dead (state {process.state})"
    endpoint = Endpoint(process.config.connect)
    address = endpoint.workers if process.role == "worker" else endpoint.clients
    if not endpoint.is_tcp or urlsplit(address).port in connected_ports():
        return ""
    return f"no connection to the scheduler at {address}"


def connected_ports(net: Path = Path("/proc/self/net")) -> set[int]:
    """The remote ports of this container's established TCP connections."""
    rows = [line.split() for name in ("tcp", "tcp6") if (net / name).exists() for line in (net / name).open()]
    return {int(row[2].rpartition(":")[2], 16) for row in rows if row[3] == "01"}  # 01: ESTABLISHED


CHECKS: dict[str, Callable[[Process], str]] = {
    "serve": check_http,
    "gateway": check_http,
    "scheduler": check_scheduler,
    "tokenizer": check_peer,
    "worker": check_peer,
}


def main() -> int:
    process = read(int(sys.argv[1])) if len(sys.argv) > 1 else find()
    try:
        problem = CHECKS[process.role](process) if process else "no quire process runs here"
    except (ConfigError, zmq.ZMQError, OSError) as error:
        problem = str(error)
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
