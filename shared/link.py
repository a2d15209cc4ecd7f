"""An asyncio process's DEALER to a ROUTER that speaks HELLO, WELCOME and heartbeats (the scheduler or a tokenizer)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from shared.errors import WireError
from shared.log import LimitedLog
from shared.peers import HEARTBEAT_INTERVAL, SILENCE_LIMIT
from shared.transport import Security, connect_dealer
from shared.wire import Fault, Goodbye, Heartbeat, Hello, HelloRequired, Message, Welcome, decode, encode

log = logging.getLogger(__name__)

REMIND_EVERY = 10.0  # seconds between log lines while nobody answers


class Link:
    """Keeps one conversation alive: says HELLO until welcomed, beats once a second, notices silence.

    hello: called for each HELLO, so that it can offer a number learnt since. on_message gets every message that is not
    part of the link's own upkeep. on_welcome gets each WELCOME (a second one means the other side restarted).
    on_lost gets a reason when nothing was heard for SILENCE_LIMIT after a WELCOME; the link then starts over.
    on_gone gets a reason, once, when an ipc peer that has welcomed this process before cannot come back: the directory
    of its socket no longer exists. (Behind a tcp address anything may start again.)
    heartbeat: called once a second for what to report.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        identity: bytes,
        address: str,
        security: Security,
        *,
        name: str,
        hello: Callable[[], Hello],
        heartbeat: Callable[[float], Heartbeat],
        on_message: Callable[[Any], None],
        on_welcome: Callable[[Welcome], None],
        on_lost: Callable[[str], None],
        on_gone: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.name = name
        self.address = address
        self.malformed = 0
        self.dropped = 0
        self._socket = connect_dealer(context, identity, address, security)
        self._hello, self._heartbeat = hello, heartbeat
        self._on_message, self._on_welcome, self._on_lost, self._on_gone = on_message, on_welcome, on_lost, on_gone
        self._directory = Path(address.removeprefix("ipc://")).parent if address.startswith("ipc://") else None
        self._ever_welcomed = False
        self._told_gone = False
        self._malformed_log, self._fault_log = LimitedLog(log), LimitedLog(log)
        self._welcomed = False
        self._heard = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def welcomed(self) -> bool:
        return self._welcomed

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]

    def send(self, message: Message) -> bool:
        """Queues a message; False when the peer's queue is full (counted; streams recover by RESUME)."""
        # The asyncio socket's own send: it resolves at once with DONTWAIT, and afterwards looks for messages that came
        # in meanwhile. A send on the underlying socket would swallow their edge-triggered wake-up.
        if self._socket.send_multipart(encode(message), zmq.DONTWAIT).exception() is not None:
            self.dropped += 1
            return False
        return True

    async def close(self, reason: str = "") -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._welcomed:
            self.send(Goodbye(reason))
        self._socket.close(linger=200)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._heard = time.monotonic()
            try:
                message = decode(frames)
            except WireError as error:
                self.malformed += 1
                self._malformed_log.warning("malformed message from %s: %s", self.name, error)
                self.send(Fault(str(error)))
                continue
            if isinstance(message, Heartbeat):
                pass  # that it was heard is all
            elif isinstance(message, Welcome):
                self._ever_welcomed = True
                self._on_welcome(message)
                self._welcomed = True
            elif isinstance(message, HelloRequired):
                self._welcomed = False
                self.send(self._hello())
            elif isinstance(message, Fault):
                self._fault_log.warning("%s refused a message: %s", self.name, message.message[:500])
            else:
                try:
                    self._on_message(message)
                except Exception:  # one message must not end the conversation for all requests
                    log.exception("while handling %s from %s", type(message).__name__, self.name)
            # While messages wait, receiving never does: everything else in this process gets its turn here.
            await asyncio.sleep(0)

    async def _beat(self) -> None:
        due = time.monotonic()
        remind = due + REMIND_EVERY
        while True:
            now = time.monotonic()
            lag = max(0.0, now - due)
            if self._welcomed:
                remind = now + REMIND_EVERY
            elif now >= remind:
                remind = now + REMIND_EVERY
                log.warning("still waiting for %s at %s", self.name, self.address)
            if not self._welcomed:
                self.send(self._hello())
                self._notice_gone()
            elif lag < HEARTBEAT_INTERVAL and now - self._heard > SILENCE_LIMIT:
                self._welcomed = False
                self._on_lost(f"{self.name} has been silent for {now - self._heard:.1f} s")
            else:
                self.send(self._heartbeat(lag))
            due = now + HEARTBEAT_INTERVAL
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    def _notice_gone(self) -> None:
        if self._ever_welcomed and not self._told_gone and self._directory is not None and not self._directory.exists():
            self._told_gone = True
            self._on_gone(f"{self.name} is gone: {self._directory} no longer exists")
