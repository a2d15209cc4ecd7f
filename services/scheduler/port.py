"""One of the scheduler's two ROUTERs: who is behind it, and messages in and out that can never end the process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zmq

from shared.errors import WireError
from shared.log import LimitedLog
from shared.metrics import Counter, Registry
from shared.peers import Peer, Peers
from shared.transport import LAST_WORD_MS
from shared.wire import (
    PROTOCOL_VERSION,
    Fault,
    Goodbye,
    Hello,
    HelloRequired,
    Message,
    decode,
    encode,
)

log = logging.getLogger(__name__)

DRAIN_AT_ONCE = 64  # messages read before the loop looks at the other socket: a flood must not delay a step

Handlers = dict[type[Message], Callable[[Peer, Any], None]]


class Traffic:
    """Counts of what went wrong, over both sockets."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.malformed: Counter = self.registry.counter(
            "quire:malformed_messages", "Messages that did not decode, or that their socket does not take."
        )
        self.dropped: Counter = self.registry.counter(
            "quire:dropped_messages", "Messages to peers that were gone or read too slowly."
        )
        self.stale: Counter = self.registry.counter(
            "quire:stale_results", "Results of another epoch, or of a step that is not in flight."
        )
        self.received = 0


class Port:
    """A ROUTER and its peers. ``on_hello`` and the handlers may raise WireError: it is counted and answered."""

    def __init__(
        self,
        sock: Any,
        epoch: int,
        traffic: Traffic,
        handlers: Handlers,
        on_hello: Callable[[bytes, Hello], None],
    ) -> None:
        self.socket = sock
        self.peers = Peers()
        self._epoch = epoch
        self._traffic = traffic
        self._handlers = handlers
        self._on_hello = on_hello
        self._malformed_log, self._fault_log = LimitedLog(log), LimitedLog(log)

    def send(self, raw: bytes, message: Message) -> None:
        self.send_frames(raw, encode(message))

    def send_frames(self, raw: bytes, frames: list[bytes]) -> None:
        try:
            self.socket.send_multipart([raw, *frames], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._traffic.dropped.inc()  # streams recover by RESUME; a peer that is gone falls silent

    def send_all(self, message: Message) -> None:
        frames = encode(message)
        for peer in self.peers:
            self.send_frames(peer.raw, frames)

    def drain(self) -> None:
        """Handles what has come, up to a bound."""
        for _ in range(DRAIN_AT_ONCE):
            try:
                raw, *frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._traffic.received += 1
            try:
                self._handle(raw, decode(frames))
            except WireError as error:
                self._refuse(raw, str(error))

    def close(self) -> None:
        self.socket.close(linger=LAST_WORD_MS)

    def _handle(self, raw: bytes, message: Message) -> None:
        if isinstance(message, Hello):
            if message.protocol != PROTOCOL_VERSION:
                raise WireError(f"protocol version {message.protocol} is not {PROTOCOL_VERSION}")
            self._on_hello(raw, message)
            return
        peer = self.peers.heard(raw)
        if peer is None:
            if not isinstance(message, (HelloRequired, Fault, Goodbye)):  # these would go back and forth for ever
                self.send(raw, HelloRequired(self._epoch))
            return
        if isinstance(message, Fault):
            self._fault_log.warning("%s refused a message: %s", peer.identity, message.message[:500])
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            raise WireError(f"{type(message).__name__} is not for this socket")
        handler(peer, message)

    def _refuse(self, raw: bytes, why: str) -> None:
        self._traffic.malformed.inc()
        self.send(raw, Fault(why))
        self._malformed_log.warning("malformed message from %r: %s", raw[:64], why[:500])
