"""Who is connected to a ROUTER: who said HELLO in this epoch, when each was last heard, what each last reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shared.ids import Identity
from shared.wire import Heartbeat, Hello

HEARTBEAT_INTERVAL = 1.0  # seconds
SILENCE_LIMIT = 3.5  # seconds without a message after which a peer counts as dead; five is the promise to clients


@dataclass(slots=True)
class Peer:
    """One process on the other side. ``client_number`` is 0 for those that have none."""

    raw: bytes
    identity: Identity
    hello: Hello
    heard: float
    client_number: int = 0
    progress: int = 0
    lag: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)


class Peers:
    """The peers of one ROUTER, by raw identity. Knows no socket; the owner sends what follows from it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, silence_limit: float = SILENCE_LIMIT) -> None:
        self._clock = clock
        self._limit = silence_limit
        self._peers: dict[bytes, Peer] = {}
        self._checked = clock()

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, raw: bytes) -> Peer | None:
        return self._peers.get(raw)

    def with_role(self, role: str) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.identity.role == role]

    def add(self, raw: bytes, hello: Hello) -> Peer:
        """Takes in a peer at its HELLO (again: its old entry stays, refreshed). Raises WireError for a bad identity."""
        peer = self._peers.get(raw)
        if peer is None:
            peer = self._peers[raw] = Peer(raw, Identity.decode(raw), hello, self._clock())
        peer.hello, peer.heard = hello, self._clock()
        return peer

    def heard(self, raw: bytes) -> Peer | None:
        """Notes a message from ``raw``; None when it has not said HELLO."""
        peer = self._peers.get(raw)
        if peer is not None:
            peer.heard = self._clock()
        return peer

    def beat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        peer.progress, peer.lag = heartbeat.progress, heartbeat.lag
        if heartbeat.metrics:
            peer.metrics = heartbeat.metrics

    def remove(self, raw: bytes) -> Peer | None:
        return self._peers.pop(raw, None)

    def silent(self) -> list[Peer]:
        """Peers not heard for the silence limit. Call about once a second.

        A check that comes late proves that this process itself was stopped; then everybody gets a fresh term, since
        their messages may still wait in the socket.
        """
        now = self._clock()
        late, self._checked = now - self._checked > 2 * HEARTBEAT_INTERVAL, now
        if late:
            for peer in self._peers.values():
                peer.heard = now
        return [peer for peer in self._peers.values() if now - peer.heard > self._limit]
