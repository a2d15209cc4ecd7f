"""The automatic prefix cache: which block holds the KV of which tokens after which prefix.

A full block is named by a hash chained over (parent's key, its token ids), the chain starting at a hash of the salt.
The hash only finds candidates: a hit compares the tokens themselves, and that the entry's parent is the very entry that
was matched before it. So equal keys of different contents cost a miss, never a wrong answer.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

from services.scheduler.free_runs import AUDITED

CANDIDATES = 8  # children of an entry, the newest first, that a last partial block is compared with
REMEMBERED = 4  # keys of evicted blocks that are remembered, to explain a miss, per block of the pool
SALTS_EXPLAINED = 64  # other salts under which ``explain`` looks for the same tokens,
BLOCKS_EXPLAINED = 16  # for so many blocks of them at most

Digest = Callable[[bytes], bytes]


def digest(data: bytes) -> bytes:
    """128 bits of BLAKE2b: nobody can make two prompts whose keys collide."""
    return blake2b(data, digest_size=16).digest()


def encode_salt(*, cache_salt: str = "", tenant: str = "", adapter: str = "") -> bytes:
    """The parts of a salt, each with its type and length, so that no two sets of parts look alike."""
    parts = ((b"s", cache_salt), (b"t", tenant), (b"a", adapter))
    encoded = [(kind, text.encode()) for kind, text in parts if text]
    return b"".join(kind + struct.pack("<I", len(raw)) + raw for kind, raw in encoded)


class Entry:
    """A published block; or the root of a salt's chains, with block 0, no parent, and the salt for tokens."""

    __slots__ = ("block", "children", "key", "parent", "tokens")

    def __init__(self, key: bytes, parent: Entry | None, tokens: bytes, block: int) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens  # little-endian int32 ids
        self.block = block
        self.children: dict[Entry, None] = {}  # the newest last


@dataclass(slots=True)
class Chain:
    """The published blocks at the start of one block table.

    keys: of as many full blocks as were ever asked for. ended: the block after the last entry stays private, because
    its key has another block already, so nothing after it can be published either.
    """

    salt: bytes
    keys: list[bytes] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    ended: bool = False

    def copy(self) -> Chain:
        """For a sequence that shares the whole table."""
        return Chain(self.salt, list(self.keys), list(self.entries), self.ended)

    def reset(self) -> None:
        """The table is given up."""
        self.entries, self.ended = [], False


@dataclass(frozen=True, slots=True)
class Match:
    """What of a sequence is cached: whole blocks, and ``inside`` tokens at the start of another block."""

    entries: list[Entry]
    source: Entry | None = None
    inside: int = 0


class PrefixCache:
    """Entries by key and by block. The block pool decides what is evicted, and tells it with ``evicted``."""

    def __init__(self, num_blocks: int, block_size: int, digest: Digest = digest) -> None:
        self.block_size = block_size
        self.collisions = 0
        self._digest = digest
        self._entries: dict[bytes, Entry] = {}
        self._by_block: list[Entry | None] = [None] * num_blocks
        self._roots: OrderedDict[bytes, Entry] = OrderedDict()  # by salt; only those with children
        self._gone: OrderedDict[bytes, None] = OrderedDict()  # keys of evicted entries, the newest last
        self._most_gone = REMEMBERED * num_blocks

    def __len__(self) -> int:
        return len(self._entries)

    def entry_of(self, block: int) -> Entry | None:
        return self._by_block[block]

    def extend_keys(self, chain: Chain, ids: bytes) -> None:
        """Makes ``chain.keys`` cover all full blocks of ``ids`` (little-endian int32)."""
        keys, digest, size = chain.keys, self._digest, 4 * self.block_size
        key = keys[-1] if keys else digest(chain.salt)
        for start in range(len(keys) * size, len(ids) - size + 1, size):
            key = digest(key + ids[start : start + size])
            keys.append(key)

    def match(self, chain: Chain, ids: bytes) -> Match:
        """The longest cached prefix of ``ids``, at least one token of which is left out of a match inside a block."""
        self.extend_keys(chain, ids)
        parent = self._roots.get(chain.salt)
        if parent is None:
            return Match([])
        size = 4 * self.block_size
        matched: list[Entry] = []
        for i, key in enumerate(chain.keys[: len(ids) // size]):
            entry = self._entries.get(key)
            if entry is None:
                break
            if not self._is(entry, parent, ids[i * size : (i + 1) * size]):
                self.collisions += 1
                break
            matched.append(entry)
            parent = entry
        rest = ids[len(matched) * size : (len(matched) + 1) * size]
        source, inside = self._inside(parent, rest)
        inside = min(inside, len(ids) // 4 - 1 - len(matched) * self.block_size)
        return Match(matched, source, inside) if inside > 0 else Match(matched)

    def publish(self, chain: Chain, block: int, tokens: bytes) -> bool:
        """The block after the chain's last entry is full, and its KV is written. Whether it is an entry now.

        It stays private when its key is another block's, or a collision; then so do all blocks after it.
        """
        index = len(chain.entries)
        known = self._by_block[block]
        if known is not None:  # a table that shares it came first
            chain.entries.append(known)
            return False
        parent = chain.entries[-1] if chain.entries else self._root(chain.salt)
        if index < len(chain.keys):
            key = chain.keys[index]
        else:
            key = self._digest(parent.key + tokens)
            chain.keys.append(key)
        rival = self._entries.get(key)
        if rival is not None:
            self.collisions += not self._is(rival, parent, tokens)
            chain.ended = True
            self._forget_empty(parent)
            return False
        entry = Entry(key, parent, tokens, block)
        self._entries[key] = entry
        self._by_block[block] = entry
        parent.children[entry] = None
        chain.entries.append(entry)
        return True

    def evicted(self, block: int) -> None:
        """The block's contents are lost."""
        entry = self._by_block[block]
        assert entry is not None
        self._remove(entry)
        self._gone[entry.key] = None
        if len(self._gone) > self._most_gone:
            self._gone.popitem(last=False)

    def clear(self) -> None:
        """All contents are lost."""
        self._entries.clear()
        self._roots.clear()
        self._by_block = [None] * len(self._by_block)

    def explain(self, salt: bytes, ids: bytes) -> dict[str, Any]:
        """What is cached of ``ids`` and why not more; changes nothing."""
        chain, size, collisions = Chain(salt), 4 * self.block_size, self.collisions
        match = self.match(chain, ids)
        collided, self.collisions = self.collisions > collisions, collisions
        whole = len(match.entries)
        cached = whole * self.block_size + match.inside
        answer: dict[str, Any] = {
            "prompt_tokens": len(ids) // 4,
            "cached_tokens": min(cached, len(ids) // 4 - 1),
            "block_size": self.block_size,
            "cached_blocks": [entry.block for entry in match.entries],
            "partial_block": None if match.source is None else {"block": match.source.block, "tokens": match.inside},
        }
        if cached >= len(ids) // 4 - 1:
            return answer | {"miss": None}
        rest = ids[whole * size : (whole + 1) * size]
        if collided:
            return answer | {"miss": {"why": "collision", "position": whole * self.block_size}}
        if whole < len(chain.keys) and chain.keys[whole] in self._gone:
            return answer | {"miss": {"why": "evicted", "position": whole * self.block_size}}
        if not cached and (blocks := self._under_another_salt(salt, ids)):
            return answer | {"miss": {"why": "salt", "position": 0, "blocks_under_another_salt": blocks}}
        parent = match.entries[-1] if match.entries else self._roots.get(salt)
        if parent is None or not parent.children:
            return answer | {"miss": {"why": "never cached", "position": cached}}
        source, inside = self._inside(parent, rest)
        nearest = source or next(reversed(parent.children))
        at = slice(4 * inside, 4 * inside + 4)
        return answer | {
            "miss": {
                "why": "first different token" if rest[at] else "too short",
                "position": whole * self.block_size + inside,
                "token": _ids(rest[at]),
                "cached_token": _ids(nearest.tokens[at]),
            }
        }

    def audit(self) -> Iterator[None]:
        """Raises AssertionError unless keys, blocks, parents and children agree. Yields after every AUDITED blocks."""
        entries = children = 0
        for block, entry in enumerate(self._by_block):
            if block % AUDITED == 0:
                yield
            if entry is None:
                continue
            entries += 1
            children += len(entry.children)
            assert entry.block == block, f"block {block} is another's entry"
            assert self._entries.get(entry.key) is entry, f"block {block} is not found under its key"
            parent = entry.parent
            assert parent is not None, "an entry without parent"
            assert entry in parent.children, "a parent does not know its child"
            known = self._roots.get(parent.tokens) if parent.parent is None else self._by_block[parent.block]
            assert known is parent, f"block {block} has lost its parent"
        assert entries == len(self._entries), "blocks and keys differ"
        for index, root in enumerate(self._roots.values()):
            if index % AUDITED == 0:
                yield
            assert root.children, "a root without children"
            children += len(root.children)
        assert children == entries, "children without an entry"

    def _is(self, entry: Entry, parent: Entry, tokens: bytes) -> bool:
        """Whether an entry found by its key is really these tokens after this parent."""
        return entry.parent is parent and entry.tokens == tokens

    def _inside(self, parent: Entry, rest: bytes) -> tuple[Entry | None, int]:
        """The child of ``parent`` whose tokens agree longest with ``rest``, and for how many tokens."""
        best, most = None, 0
        for child in islice(reversed(parent.children), CANDIDATES):
            agreed = _agreement(child.tokens, rest)
            if agreed > most:
                best, most = child, agreed
        return best, most

    def _under_another_salt(self, salt: bytes, ids: bytes) -> int:
        """The most blocks at the start of ``ids`` that are cached under another salt, as far as it is looked for."""
        most, ids = 0, ids[: 4 * self.block_size * BLOCKS_EXPLAINED]
        for other in islice(reversed(self._roots), SALTS_EXPLAINED):
            if other != salt:
                collisions = self.collisions
                most = max(most, len(self.match(Chain(other), ids).entries))
                self.collisions = collisions
        return most

    def _root(self, salt: bytes) -> Entry:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Entry(self._digest(salt), None, salt, 0)
        return root

    def _remove(self, entry: Entry) -> None:
        assert not entry.children, "an entry goes before its children"
        parent = entry.parent
        assert parent is not None
        del self._entries[entry.key]
        self._by_block[entry.block] = None
        del parent.children[entry]
        self._forget_empty(parent)

    def _forget_empty(self, parent: Entry) -> None:
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.tokens, None)


def _agreement(some: bytes, others: bytes) -> int:
    """How many int32 at the start of both are equal."""
    if some[:4] != others[:4]:
        return 0
    pairs = zip(memoryview(some).cast("i"), memoryview(others).cast("i"), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)) // 4)


def _ids(raw: bytes) -> int | None:
    return int.from_bytes(raw, "little") if raw else None


def pack(ids: Sequence[int]) -> bytes:
    """Token ids as an entry keeps them."""
    return struct.pack(f"<{len(ids)}i", *ids)
