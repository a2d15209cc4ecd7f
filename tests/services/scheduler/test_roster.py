from __future__ import annotations

import pytest

from services.scheduler.roster import ClientNumbers, LiveTokenizers
from shared.errors import WireError
from shared.ids import MAX_CLIENT_NUMBER, Identity
from shared.peers import Peer
from shared.wire import PROTOCOL_VERSION, Hello


def tokenizer(address: str) -> Peer:
    identity = Identity.fresh("tokenizer", 0)
    return Peer(identity.encode(), identity, Hello(PROTOCOL_VERSION, "tokenizer", 0, 1, address=address), 0.0)


def test_a_number_is_never_given_to_another_gateway() -> None:
    numbers = ClientNumbers()
    assert [numbers.assign(name) for name in (b"a", b"b", b"a", b"c")] == [1, 2, 1, 3]


def test_numbers_run_out_with_a_clear_error() -> None:
    numbers = ClientNumbers()
    for index in range(MAX_CLIENT_NUMBER):
        numbers.assign(str(index).encode())
    assert numbers.assign(b"0") == 1
    with pytest.raises(WireError, match="all 65535 client numbers are given away"):
        numbers.assign(b"one more")


def test_the_roster_changes_only_when_tokenizers_do() -> None:
    live, first, second = LiveTokenizers(), tokenizer("ipc:///a"), tokenizer("ipc:///b")
    assert live.update([first])
    assert not live.update([first])
    assert live.update([first, second])
    message = live.message()
    assert (message.version, message.addresses) == (2, ["ipc:///a", "ipc:///b"])
    assert message.identities == [first.raw.decode(), second.raw.decode()]
    assert live.update([second])
    assert live.message().addresses == ["ipc:///b"]
