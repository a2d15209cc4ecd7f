"""Real scheduler and null worker processes over ipc, and a client that plays a tokenizer or a gateway."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from shared.ids import Identity
from shared.peers import HEARTBEAT_INTERVAL
from shared.sampling import SamplingParams
from shared.transport import Endpoint, Security, connect_dealer
from shared.wire import (
    PROTOCOL_VERSION,
    Ack,
    Done,
    Fault,
    Finished,
    Heartbeat,
    Hello,
    HelloRequired,
    Message,
    Query,
    Reply,
    SubmitTokens,
    Tokens,
    Welcome,
    decode,
    encode,
)

PATIENCE = 20.0  # seconds any wait of these tests may take


class Client:
    """A tokenizer or gateway made of one raw DEALER. Collects what the scheduler sends."""

    def __init__(self, base: str, role: str = "tokenizer", index: int = 0) -> None:
        self.identity = Identity.fresh(role, index).encode()
        self.role = role
        self._context = zmq.Context()
        self.socket = connect_dealer(self._context, self.identity, Endpoint(base).clients, Security())
        self.messages: list[Any] = []
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], Finished] = {}
        self.done: dict[int, Done] = {}
        self.acknowledges = True
        self.epoch = 0
        self._beat_at = 0.0

    def hello(self) -> Hello:
        address = f"ipc:///nowhere/{self.identity.decode()}" if self.role == "tokenizer" else ""
        return Hello(PROTOCOL_VERSION, self.role, 0, 1, address=address, pid=os.getpid())

    def join(self) -> Welcome:
        self.send(self.hello())
        welcome: Welcome = self.wait_for(lambda: self.last(Welcome))
        self.epoch = welcome.epoch
        return welcome

    def send(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    def pump(self, timeout: float = 0.05) -> None:
        """Takes in what has come, waiting up to ``timeout`` for the first message; beats when it is time."""
        now = time.monotonic()
        if now - self._beat_at > HEARTBEAT_INTERVAL:
            self._beat_at = now
            self.send(Heartbeat(self.epoch, 0, 0.0) if self.epoch else self.hello())
        wait = int(timeout * 1000)
        while self.socket.poll(wait):
            wait = 0
            message = decode(self.socket.recv_multipart())
            if isinstance(message, Heartbeat):
                continue
            self.messages.append(message)
            if isinstance(message, Tokens):
                self._take(message)
            elif isinstance(message, HelloRequired):
                self.send(self.hello())

    def _take(self, message: Tokens) -> None:
        ids, start = message.ids.tolist(), 0
        for rid, seq, offset, count in zip(message.rids, message.seqs, message.offsets, message.counts, strict=True):
            output = self.outputs.setdefault((rid, seq), [])
            assert offset <= len(output), "a gap in the stream"
            output[offset:] = ids[start : start + count]
            start += count
        for finished in message.finished:
            self.finished[finished.rid, finished.seq] = finished
        for done in message.done:
            self.done[done.rid] = done
        if message.done and self.acknowledges:
            self.send(Ack([done.rid for done in message.done]))

    def last(self, kind: type[Any]) -> Any:
        return next((message for message in reversed(self.messages) if isinstance(message, kind)), None)

    def wait_for(self, condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
        deadline = time.monotonic() + patience
        while not (value := condition()):
            assert time.monotonic() < deadline, f"nothing but {self.messages[-5:]}"
            self.pump()
        return value

    def submit(self, rid: int, prompt: list[int], max_tokens: int, **sampling: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
        self.send(SubmitTokens(rid, f"req-{rid}", params, np.asarray(prompt, dtype=np.int32)))

    def query(self, what: str, cursor: int = 0) -> Reply:
        number = len(self.messages) + 1
        self.send(Query(number, what, cursor=cursor))
        reply: Reply = self.wait_for(lambda: self._reply(number))
        return reply

    def _reply(self, number: int) -> Reply | None:
        return next((m for m in self.messages if isinstance(m, Reply) and m.number == number), None)

    def faults(self) -> int:
        return sum(isinstance(message, Fault) for message in self.messages)

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


class Server:
    """One scheduler and its null workers as child processes, with their logs in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = f"ipc://{folder}/sockets"
        self.scheduler: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, *scheduler_options: str, ranks: int = 1, worker_options: tuple[str, ...] = ()) -> None:
        self.scheduler = self.spawn(
            "scheduler", f"--bind={self.base}", f"--tensor-parallel-size={ranks}", *scheduler_options
        )
        self.workers = [self.start_worker(rank, *worker_options) for rank in range(ranks)]

    def start_worker(self, rank: int, *options: str) -> subprocess.Popen[bytes]:
        return self.spawn("worker", "--worker=null", f"--connect={self.base}", f"--index={rank}", *options)

    def spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}-{len(self._children)}.log").open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "services.cli", *command], stdout=output, stderr=subprocess.STDOUT
            )
        self._children.append(child)
        return child

    def log(self, name: str) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{name}-*.log")))

    def kill(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait(10)


@contextlib.contextmanager
def running(folder: Path, *options: str, **more: Any) -> Iterator[tuple[Server, Client]]:
    """A ready server and a welcomed tokenizer."""
    server = Server(folder)
    client = Client(server.base)
    try:
        server.start(*options, **more)
        client.join()
        yield server, client
    finally:
        client.close()
        server.kill()
