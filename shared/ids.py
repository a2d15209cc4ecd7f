"""Names of processes and requests on the wires.

An *identity* names one run of one process: ``role:index:incarnation``, the incarnation being 8 random bytes in hex.
A *rid* names a request: 16 bits of the gateway's client number above 48 bits of its own counter, so gateways never
need to agree on anything to stay unique. An *epoch* names one run of the scheduler or of a worker; it is a positive
63-bit integer that differs between runs.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass

from shared.errors import WireError

ROLES = ("gateway", "tokenizer", "worker")
COUNTER_BITS = 48
MAX_CLIENT_NUMBER = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a DEALER is. ``index`` is the process's place among its role (a worker's rank)."""

    role: str
    index: int
    incarnation: str

    @classmethod
    def fresh(cls, role: str, index: int) -> Identity:
        return cls(role, index, secrets.token_hex(8))

    def encode(self) -> bytes:
        return f"{self.role}:{self.index}:{self.incarnation}".encode()

    @classmethod
    def decode(cls, raw: bytes) -> Identity:
        """Raises WireError when ``raw`` is not ``role:index:incarnation`` of a known role."""
        try:
            role, index, incarnation = raw.decode("ascii").split(":")
            if role in ROLES and index.isdecimal() and len(incarnation) == 16:
                return cls(role, int(index), incarnation)
        except ValueError:
            pass
        raise WireError(f"identity {raw[:64]!r} is not role:index:incarnation")

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


def new_epoch() -> int:
    return secrets.randbits(62) + 1


def client_of(rid: int) -> int:
    """The client number of the gateway that made ``rid``."""
    return rid >> COUNTER_BITS


class RidMaker:
    """Hands out this gateway's rids in order; the counter starts at 1."""

    def __init__(self, client_number: int) -> None:
        if not 0 < client_number <= MAX_CLIENT_NUMBER:
            raise ValueError(f"client number {client_number} is outside 1..{MAX_CLIENT_NUMBER}")
        self._base = client_number << COUNTER_BITS
        self._counter = itertools.count(1)

    def __call__(self) -> int:
        return self._base | next(self._counter)
