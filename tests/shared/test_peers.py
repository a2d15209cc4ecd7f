from __future__ import annotations

import pytest

from shared.errors import WireError
from shared.ids import Identity, RidMaker, client_of
from shared.peers import Peers
from shared.wire import PROTOCOL_VERSION, Heartbeat, Hello


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def join(peers: Peers, role: str = "gateway", index: int = 0) -> bytes:
    raw = Identity.fresh(role, index).encode()
    peers.add(raw, Hello(PROTOCOL_VERSION, role, index, 1))
    return raw


def test_silence_counts_from_the_last_message() -> None:
    clock = Clock()
    peers = Peers(clock)
    quiet, loud = join(peers), join(peers, index=1)
    for _ in range(5):
        clock.now += 0.9
        assert peers.heard(loud) is not None
        silent = peers.silent()
    assert [peer.raw for peer in silent] == [quiet]


def test_a_process_that_was_stopped_gives_a_fresh_term() -> None:
    clock = Clock()
    peers = Peers(clock)
    join(peers)
    clock.now += 60
    assert peers.silent() == []
    for _ in range(5):
        clock.now += 1
        silent = peers.silent()
    assert len(silent) == 1


def test_strangers_are_not_peers() -> None:
    peers = Peers()
    assert peers.heard(b"gateway:0:0123456789abcdef") is None
    for raw in (b"", b"cook:0:0123456789abcdef", b"gateway:x:0123456789abcdef", b"gateway:0:short", b"\xff\xfe"):
        with pytest.raises(WireError, match="role:index:incarnation"):
            peers.add(raw, Hello(PROTOCOL_VERSION, "gateway", 0, 1))


def test_heartbeats_keep_the_last_metrics() -> None:
    peers = Peers()
    raw = join(peers)
    peer = peers.get(raw)
    assert peer is not None
    peers.beat(peer, Heartbeat(1, 5, 0.25, {"a": 1}))
    peers.beat(peer, Heartbeat(1, 6, 0.0))
    assert (peer.progress, peer.lag, peer.metrics) == (6, 0.0, {"a": 1})


def test_rids_carry_their_gateway() -> None:
    first, second = RidMaker(3), RidMaker(65535)
    rids = [first(), first(), second()]
    assert rids == [(3 << 48) + 1, (3 << 48) + 2, (65535 << 48) + 1]
    assert [client_of(rid) for rid in rids] == [3, 3, 65535]
    with pytest.raises(ValueError, match="65536"):
        RidMaker(65536)
