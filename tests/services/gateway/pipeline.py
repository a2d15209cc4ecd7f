"""The rest of the pipeline as a gateway sees it: scheduler and tokenizers that speak the wire protocol on raw sockets.

A test scripts them by hand (``submitted``, ``accept``, ``text``, ``finish``), or lets a tokenizer answer by itself.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx
import zmq

from shared.channels import CONTENT
from shared.codec import int32
from shared.ids import new_epoch
from shared.sampling import SamplingDefaults
from shared.wire import (
    PROTOCOL_VERSION,
    Accept,
    Done,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Query,
    Reject,
    Reply,
    Roster,
    SubmitText,
    Text,
    Welcome,
    decode,
    encode,
)

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 512
M = TypeVar("M", bound=Message)


class Peer:
    """A ROUTER in a thread: welcomes whoever says HELLO, beats back, and keeps everything else for the test."""

    def __init__(self, address: str, answer: Callable[[Peer, bytes, Any], None] | None = None) -> None:
        self.address = address
        self.defaults = SamplingDefaults()
        self.epoch = new_epoch()
        self.hellos: list[Hello] = []
        self.clients: list[bytes] = []
        self.muted = False
        self.answer = answer
        self._inbox: queue.Queue[tuple[bytes, Any]] = queue.Queue()
        self._held: list[tuple[bytes, Any]] = []
        self._outbox: deque[tuple[bytes, list[bytes]]] = deque()
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending = True
        self._thread.join(5)

    def send(self, client: bytes, message: Message) -> None:
        self._outbox.append((client, encode(message)))

    def send_raw(self, client: bytes, frames: list[bytes]) -> None:
        self._outbox.append((client, frames))

    def expect(self, kind: type[M], timeout: float = 5.0, where: Callable[[Any], bool] = lambda _: True) -> M:
        """The next message of that kind (others are kept for later)."""
        return self.expect_from(kind, timeout, where)[1]

    def expect_from(
        self, kind: type[M], timeout: float = 5.0, where: Callable[[Any], bool] = lambda _: True
    ) -> tuple[bytes, M]:
        due = time.monotonic() + timeout
        while True:
            for index, (client, message) in enumerate(self._held):
                if isinstance(message, kind) and where(message):
                    del self._held[index]
                    return client, message
            left = due - time.monotonic()
            try:
                self._held.append(self._inbox.get(timeout=max(left, 0.001)))
            except queue.Empty:
                raise AssertionError(f"no {kind.__name__} within {timeout} s; got {self._held}") from None

    def _run(self) -> None:
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.SNDHWM, 0)
        router.bind(self.address)
        try:
            while not self._ending:
                while self._outbox:
                    client, frames = self._outbox.popleft()
                    router.send_multipart([client, *frames])
                if router.poll(5):
                    client, *frames = router.recv_multipart()
                    if not self.muted:
                        self._take(client, decode(frames))
        finally:
            router.close(0)
            context.term()

    def _take(self, client: bytes, message: Any) -> None:
        if isinstance(message, Hello):
            assert message.protocol == PROTOCOL_VERSION
            self.hellos.append(message)
            if client not in self.clients:
                self.clients.append(client)
            number = message.client_number or 7
            limits = (16, 100, MAX_MODEL_LEN, VOCAB_SIZE, [2])
            self.send(client, Welcome(self.epoch, number, *limits, "digest", "a/toy model", self.defaults))
            self.welcomed(client)
        elif isinstance(message, Heartbeat):
            self.send(client, Heartbeat(self.epoch, 0, 0.0))
        elif self.answer is not None:
            self.answer(self, client, message)
        else:
            self._inbox.put((client, message))

    def welcomed(self, client: bytes) -> None:
        pass


class Scheduler(Peer):
    """Also sends the roster, at each WELCOME and when a test changes it; answers ``metrics``."""

    def __init__(self, address: str, tokenizers: list[Tokenizer]) -> None:
        self.tokenizers = tokenizers
        self.snapshots: list[dict[str, Any]] = []
        self._version = 0
        super().__init__(address, Scheduler._reply)

    def welcomed(self, client: bytes) -> None:
        self.tell_roster([client])

    def tell_roster(self, clients: list[bytes] | None = None) -> None:
        self._version += 1
        identities = [tokenizer.identity for tokenizer in self.tokenizers]
        for client in self.clients if clients is None else clients:
            self.send(client, Roster(self._version, identities, [tokenizer.address for tokenizer in self.tokenizers]))

    @staticmethod
    def _reply(self: Peer, client: bytes, message: Any) -> None:
        assert isinstance(self, Scheduler)
        if isinstance(message, Query):
            assert message.what == "metrics"
            self.send(client, Reply(message.number, 200, self.snapshots))
        else:
            self._inbox.put((client, message))


class Tokenizer(Peer):
    """Scripted by the test, or answering every request with ``words`` when ``automatic``."""

    def __init__(self, address: str, index: int) -> None:
        self.identity = f"tokenizer:{index}:{os.urandom(8).hex()}"
        super().__init__(address)

    def submitted(self, timeout: float = 5.0) -> Answer:
        client, submit = self.expect_from(SubmitText, timeout)
        return Answer(self, client, submit)

    def automatic(self, words: list[str]) -> None:
        """From now on every request is answered at once, one TEXT per word, and ends by its length."""

        def answer(peer: Peer, client: bytes, message: Any) -> None:
            if isinstance(message, SubmitText):
                one = Answer(self, client, message)
                one.accept()
                for word in words:
                    one.text(word)
                one.finish("length")
            else:
                self._inbox.put((client, message))

        self.answer = answer


class Answer:
    """One request at a tokenizer, answered step by step; keeps the offsets."""

    def __init__(self, tokenizer: Tokenizer, client: bytes, submit: SubmitText) -> None:
        self.tokenizer, self.client, self.submit = tokenizer, client, submit
        self.rid = submit.rid
        self.chars = 0
        self.tokens = 0

    def send(self, message: Message) -> None:
        self.tokenizer.send(self.client, message)

    def accept(self, prompt_tokens: int = 5, prompt_ids: list[int] | None = None, prompt: str = "") -> None:
        self.send(Accept(self.rid, prompt_tokens, int32(prompt_ids or []), prompt))

    def reject(self, status: int, code: str, param: str, message: str, retry_after: float | None = None) -> None:
        self.send(Reject(self.rid, status, code, param, message, retry_after))

    def text(
        self,
        text: str,
        tokens: int = 1,
        ids: list[int] | None = None,
        offset: int | None = None,
        channel: int = CONTENT,
    ) -> None:
        if offset is None:
            offset, self.chars = self.chars, self.chars + len(text)
            self.tokens += tokens
        ids = ids or []
        self.send(Text([self.rid], [0], [offset], [channel], [text], [self.tokens], [len(ids)], int32(ids)))

    def finish(
        self,
        reason: str = "stop",
        stop_reason: str = "",
        message: str = "",
        cached: int = 0,
        code: str = "",
        reasoning: int | None = None,
    ) -> None:
        finished = Finished(self.rid, 0, self.tokens, reason, stop_reason, message, code, reasoning)
        done = Done(self.rid, 5, cached, self.tokens)
        self.send(Text([], [], [], [], [], [], [], int32([]), [finished], [done]))


class Gateway:
    """A real gateway process on a free port: a socket as a launcher passes it on, or one of its own."""

    def __init__(self, base: str, *options: str, env: dict[str, str] | None = None, inherit: bool = True) -> None:
        self.log = tempfile.TemporaryFile("a+")  # noqa: SIM115 (closed with the process)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
            if not inherit:
                sock.close()
                self._start([f"--connect={base}", f"--port={self.port}", *options], env, [])
                return
            sock.set_inheritable(True)
            self._start([f"--connect={base}", f"--fd={sock.fileno()}", *options], env, [sock.fileno()])

    def _start(self, options: list[str], env: dict[str, str] | None, fds: list[int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "gateway", *options],
            pass_fds=[*fds, *self._further_fds(env)],
            env={**os.environ, **(env or {})},
            stderr=self.log,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @staticmethod
    def _further_fds(env: dict[str, str] | None) -> list[int]:
        return [int(value) for name, value in (env or {}).items() if name == "QUIRE_LIFELINE_FD"]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)

    def wait_answering(self, path: str = "/ready", status: int = 200, timeout: float = 20.0) -> httpx.Response:
        due = time.monotonic() + timeout
        last: httpx.Response | None = None
        while time.monotonic() < due:
            with contextlib.suppress(httpx.TransportError):
                last = httpx.get(self.url + path)
                if last.status_code == status:
                    return last
            time.sleep(0.05)
        raise AssertionError(f"{path} did not answer {status}; last {last}; log:\n{self.output()}")

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def wait_log(self, pattern: str, timeout: float = 10.0) -> str:
        """The log once ``pattern`` is in it."""
        due = time.monotonic() + timeout
        while not re.search(pattern, log := self.output()):
            assert time.monotonic() < due, log
            time.sleep(0.02)
        return log

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.log.close()


class Pipeline:
    """A scheduler, tokenizers and gateways in a private directory."""

    def __init__(self, tokenizers: int = 1) -> None:
        self.directory = tempfile.mkdtemp(prefix="quire")
        self.base = f"ipc://{self.directory}"
        self.tokenizers = [self._tokenizer(index) for index in range(tokenizers)]
        self.scheduler = Scheduler(f"{self.base}/clients", list(self.tokenizers))
        self.gateways: list[Gateway] = []

    def _tokenizer(self, index: int) -> Tokenizer:
        return Tokenizer(f"{self.base}/tokenizer{index}", index)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers[0]

    def add_tokenizer(self) -> Tokenizer:
        tokenizer = self._tokenizer(len(self.tokenizers))
        self.tokenizers.append(tokenizer)
        self.scheduler.tokenizers.append(tokenizer)
        self.scheduler.tell_roster()
        return tokenizer

    def gateway(
        self, *options: str, env: dict[str, str] | None = None, ready: bool = True, inherit: bool = True
    ) -> Gateway:
        gateway = Gateway(self.base, *options, env=env, inherit=inherit)
        self.gateways.append(gateway)
        if ready:
            gateway.wait_answering()
        return gateway

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.close()
        for peer in [self.scheduler, *self.tokenizers]:
            peer.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def running(tokenizers: int = 1) -> Iterator[Pipeline]:
    pipeline = Pipeline(tokenizers)
    try:
        yield pipeline
    finally:
        pipeline.close()
