"""Gateways' client numbers, and the list of live tokenizers that gateways get."""

from __future__ import annotations

from collections.abc import Iterable

from shared.errors import ConfigError, WireError
from shared.ids import MAX_CLIENT_NUMBER
from shared.peers import Peer
from shared.transport import check_connectable
from shared.wire import Hello, Roster


def check_tokenizer(hello: Hello) -> None:
    """Raises WireError for a tokenizer at an address that gateways cannot connect to."""
    try:
        check_connectable(hello.address)
    except ConfigError as error:
        raise WireError(f"a tokenizer's {error}") from error


class ClientNumbers:
    """1..65535, each given to one gateway incarnation and never to another, so that rids stay unique."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def assign(self, raw: bytes) -> int:
        """The number of this incarnation, the same at every HELLO. Raises WireError when all are used up."""
        if raw not in self._numbers:
            if len(self._numbers) == MAX_CLIENT_NUMBER:
                raise WireError(f"all {MAX_CLIENT_NUMBER} client numbers are given away; restart the scheduler")
            self._numbers[raw] = len(self._numbers) + 1
        return self._numbers[raw]


class LiveTokenizers:
    """The roster, with a version that grows at each change."""

    def __init__(self) -> None:
        self._version = 0
        self._entries: dict[str, str] = {}

    def update(self, tokenizers: Iterable[Peer]) -> bool:
        """Takes the tokenizers alive now; whether that changed anything."""
        entries = {peer.raw.decode(): peer.hello.address for peer in tokenizers}
        if entries == self._entries:
            return False
        self._entries = entries
        self._version += 1
        return True

    def message(self) -> Roster:
        return Roster(self._version, list(self._entries), list(self._entries.values()))
