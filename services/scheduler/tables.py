"""Block tables of sequences over one pool: what they share with one another, and with the past."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from services.scheduler.block_pool import BlockPool
from services.scheduler.free_runs import AUDITED
from services.scheduler.limits import Limits
from services.scheduler.prefix_cache import Digest, Match, PrefixCache, digest, pack
from services.scheduler.request import Sequence
from shared.codec import no_ids

NOTHING = Match([])


class Tables:
    """Changes ``Sequence.blocks`` and ``Sequence.chain``, and keeps pool and prefix cache in step with them."""

    def __init__(self, limits: Limits, digest: Digest = digest) -> None:
        self.cache = PrefixCache(limits.num_blocks, limits.block_size, digest)
        self.pool = BlockPool(limits.num_blocks, self.cache.evicted)
        self._enabled = limits.enable_prefix_caching
        self.block_size = limits.block_size
        self._writers: dict[bytes, Sequence] = {}  # keys of blocks not published yet → who computes them

    # ---- the prefix cache ------------------------------------------------------------------------------------------

    def take_counts(self) -> tuple[int, int]:
        """Collisions and evictions since the last call."""
        collisions, self.cache.collisions = self.cache.collisions, 0
        evictions, self.pool.num_evicted = self.pool.num_evicted, 0
        return collisions, evictions

    def look_up(self, sequence: Sequence) -> Match:
        """What is cached of the sequence's feed."""
        return self.cache.match(sequence.chain, sequence.feed.tobytes()) if self._enabled else NOTHING

    def is_being_written(self, sequence: Sequence, match: Match) -> bool:
        """Whether another sequence computes the block after ``match`` right now, for the same tokens and salt."""
        index = len(match.entries)
        keys, end = sequence.chain.keys, (index + 1) * self.block_size
        if not self._enabled or index >= len(keys) or end >= len(sequence.feed):
            return False
        writer = self._writers.get(keys[index])
        if writer is None or writer is sequence or writer.chain.salt != sequence.chain.salt:
            return False
        sequence.awaited = keys[index]
        return np.array_equal(writer.feed[:end], sequence.feed[:end])

    def is_key_being_written(self, sequence: Sequence) -> bool:
        """Whether what the sequence was found to wait for is still under way."""
        return sequence.awaited in self._writers

    def adopt(self, sequence: Sequence, match: Match, *, slack: int, step_id: int) -> tuple[int, int] | None:
        """Starts the table of a sequence with what is cached, if the blocks that are still missing are available.

        The matched blocks are held before any other is allocated, so that none of them is evicted for that. A match
        inside a block is taken by copy: returns (tokens that need not be computed, source block of the copy or 0), the
        copy's destination being the table's last block, and the source pinned until ``step_id`` is retired. None: it
        does not fit while ``slack`` blocks stay available.
        """
        pool, hits = self.pool, [entry.block for entry in match.entries]
        missing = -(-len(sequence.feed) // self.block_size) - len(hits)
        pool.share(hits, sequence)
        if missing > pool.num_available - slack:
            pool.release(hits, sequence)
            sequence.missing = missing
            return None
        sequence.missing = 0
        cached, source = len(hits) * self.block_size, 0
        if match.source is not None:
            pool.share([match.source.block], step_id)
            if missing <= pool.num_available - slack:
                source = match.source.block
                cached += match.inside
                hits += pool.allocate(1, sequence, "copy of a prefix", after=hits[-1] if hits else 0)
            else:  # the source itself is one of the last blocks: it is worth more as a free one
                pool.release([match.source.block], step_id)
        sequence.blocks = hits
        sequence.chain.entries = list(match.entries)
        for key in sequence.chain.keys[len(match.entries) :] if self._enabled else ():
            self._writers.setdefault(key, sequence)
        return cached, source

    def publish(self, sequence: Sequence, length: int) -> None:
        """The KV of the sequence's first ``length`` tokens is written: others may find its full blocks now."""
        chain, size, blocks = sequence.chain, self.block_size, sequence.blocks
        if chain.ended:
            return
        full = min(length, sequence.num_tokens) // size
        while len(chain.entries) < full and not chain.ended:
            index = len(chain.entries)
            block = blocks[index]
            if self.cache.publish(chain, block, self._tokens(sequence, index * size, (index + 1) * size)):
                self.pool.keep(block)
            if index < len(chain.keys):
                self._written(sequence, chain.keys[index])
        if chain.ended:
            self._give_up_writing(sequence)

    def clear(self) -> None:
        """The memory's contents are lost; nobody holds any of it."""
        self.cache.clear()
        self.pool.drop_cached()
        self._writers.clear()

    # ---- tables ----------------------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, count: int, why: str) -> list[int]:
        """``count`` more blocks at the end of a table."""
        blocks = self.pool.allocate(count, sequence, why, after=sequence.blocks[-1] if sequence.blocks else 0)
        sequence.blocks += blocks
        return blocks

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` shares the whole table of ``parent``, a last partial block too."""
        self.pool.share(parent.blocks, child)
        child.blocks = list(parent.blocks)
        child.chain = parent.chain.copy()

    def copies_needed(self, writers: Iterable[tuple[Sequence, int]]) -> int:
        """How many blocks ``unshare`` will allocate for sequences that each write to a block of their table."""
        writes = Counter(sequence.blocks[index] for sequence, index in writers)
        needed = 0
        for block, count in writes.items():
            holders = self.pool.holders(block)
            needed += count if holders > count else holders - 1
        return needed

    def unshare(self, sequence: Sequence, index: int, step_id: int) -> tuple[int, int] | None:
        """Before a write to a block: (source, destination) of its copy, or None: its last owner writes in place.

        The source is pinned until the step that copies it is retired.
        """
        block = sequence.blocks[index]
        if self.pool.holders(block) < 2:
            return None
        (copy,) = self.pool.allocate(1, sequence, "copy on write", after=sequence.blocks[index - 1] if index else 0)
        sequence.blocks[index] = copy
        self.pool.share([block], step_id)
        self.pool.release([block], sequence)
        return block, copy

    def release(self, sequence: Sequence) -> None:
        """No step in flight names the table any more."""
        self._give_up_writing(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        self.pool.release(blocks, sequence)
        sequence.chain.reset()
        sequence.feed = no_ids()

    def audit(self, holdings: Iterable[tuple[object, list[int]]]) -> Iterator[None]:
        """Raises AssertionError when pool, cache and the tables in ``holdings`` contradict one another.

        Yields after every AUDITED blocks.
        """
        pool, cache = self.pool, self.cache
        yield from pool.audit(holdings)
        yield from cache.audit()
        assert all(writer.blocks for writer in self._writers.values()), (
            "who has no blocks is waited for to compute some"
        )
        place: dict[int, int] = {}
        for index, block in enumerate(pool.cached()):
            if index % AUDITED == 0:
                yield
            place[block] = index
        for block in range(1, pool.num_usable + 1):
            if block % AUDITED == 0:
                yield
            entry = cache.entry_of(block)
            assert (entry is not None) == pool.is_kept(block), f"block {block} is kept without being an entry"
            if entry is None or entry.parent is None or entry.parent.parent is None:
                continue
            parent = entry.parent.block
            if block in place:
                assert parent not in place or place[block] < place[parent], f"{parent} goes before its child {block}"
            else:
                assert pool.holders(parent), f"block {block} is in use, its parent {parent} is not"

    def _tokens(self, sequence: Sequence, start: int, end: int) -> bytes:
        prompt, output = sequence.request.prompt, sequence.output
        split = len(prompt)
        if end <= split:
            return prompt[start:end].tobytes()
        return prompt[start:split].tobytes() + pack(output[max(start - split, 0) : end - split])

    def _written(self, sequence: Sequence, key: bytes) -> None:
        if self._writers.get(key) is sequence:
            del self._writers[key]

    def _give_up_writing(self, sequence: Sequence) -> None:
        if self._writers:
            for key in sequence.chain.keys[len(sequence.chain.entries) :]:
                self._written(sequence, key)
