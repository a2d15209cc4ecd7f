"""Where every physical KV block is: free, in use by owners, or cached for whoever needs its contents next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

from services.scheduler.free_runs import AUDITED, FreeRuns

Owner = Any
"""Whoever holds a block: a sequence, or the id of a step that must be retired before the block may change (a pin)."""

EVICT_AHEAD = 16  # evicts one part in this many of the pool at once, so that what comes free forms longer runs


class BlockState(Enum):
    FREE = "free"
    USED = "used"
    CACHED = "cached"


class BlockPool:
    """Blocks 1..num_blocks-1. Block 0 is padding: never owned, and outside every count here.

    A block is in exactly one state: free, in use (it has owners), or cached (no owner, but ``keep`` says that its
    contents are worth keeping; the longest unused one is evicted when free blocks run out). Every change of state is
    O(1) per block. ``evicted`` is called for a cached block before anybody else can get it. ``now`` is the time that
    changes of state are noted with; whoever owns the pool sets it.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[int], None] = lambda block: None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give: block 0 is padding")
        self.num_usable = num_blocks - 1
        self.now = 0.0
        self.num_evicted = 0
        self._evicted = evicted
        self._free = FreeRuns(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._kept = bytearray(num_blocks)
        self._owners: list[list[Owner]] = [[] for _ in range(num_blocks)]
        self._why = [""] * num_blocks
        self._since = [0.0] * num_blocks
        self._free.add(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give: free ones, and cached ones that it evicts for that."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free) - len(self._cached)

    def references(self, block: int) -> int:
        return len(self._owners[block])

    def owners(self, block: int) -> Sequence[Owner]:
        return self._owners[block]

    def holders(self, block: int) -> int:
        """How many sequences hold it. Pins do not count: they only wait for their step."""
        return sum(type(owner) is not int for owner in self._owners[block])

    def state(self, block: int) -> BlockState:
        if self._owners[block]:
            return BlockState.USED
        return BlockState.CACHED if block in self._cached else BlockState.FREE

    def why(self, block: int) -> str:
        """What the block was last given out or put away for."""
        return self._why[block]

    def since(self, block: int) -> float:
        """When it came into its state."""
        return self._since[block]

    def allocate(self, count: int, owner: Owner, why: str, after: int = 0) -> list[int]:
        """``count`` blocks owned by ``owner`` alone, continuing ``after`` where it can.

        Consecutive blocks are read faster, so each block is last + 1 if that is free, else the first of the longest
        free run. Raises ValueError when fewer than ``count`` are available; callers look at ``num_available`` first.
        """
        if count > len(self._free):
            self._evict(count)
        taken = self._free.take(count, after)
        now = self.now
        for block in taken:
            self._owners[block].append(owner)
            self._why[block] = why
            self._since[block] = now
        return taken

    def share(self, blocks: Iterable[int], owner: Owner) -> None:
        """One more owner for each block; all must be in use or cached."""
        for block in blocks:
            owners = self._owners[block]
            if not owners:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._cached[block]
                self._why[block], self._since[block] = "prefix hit", self.now
            owners.append(owner)

    def release(self, blocks: Sequence[int], owner: Owner) -> None:
        """``owner`` lets go of blocks, the last one first: of cached blocks a later one is evicted before an earlier.

        Those without any owner become cached or free. Raises ValueError when ``owner`` does not hold one of them.
        """
        freed: list[int] = []
        for block in reversed(blocks):
            owners = self._owners[block]
            try:
                owners.remove(owner)
            except ValueError:
                raise ValueError(f"block {block} is not held by {owner!r}") from None
            if not owners:
                self._since[block] = self.now
                if self._kept[block]:
                    self._cached[block] = None
                else:
                    self._why[block] = ""
                    freed.append(block)
        self._free.add(freed)

    def keep(self, block: int) -> None:
        """The contents of this block in use are worth keeping when its last owner goes."""
        self._kept[block] = True

    def is_kept(self, block: int) -> bool:
        return bool(self._kept[block])

    def drop_cached(self) -> None:
        """Nothing in memory is of use any more: cached blocks become free, those in use will."""
        blocks = list(self._cached)
        self._cached.clear()
        self._kept = bytearray(len(self._kept))
        self._free.add(blocks)

    def cached(self) -> list[int]:
        """Cached blocks, the next to be evicted first."""
        return list(self._cached)

    def run_lengths(self) -> Counter[int]:
        """How many runs of consecutive free blocks there are of each length."""
        return self._free.lengths()

    def audit(self, holdings: Iterable[tuple[Owner, Sequence[int]]]) -> Iterator[None]:
        """Raises AssertionError unless each block is in one state and its owners are exactly those in ``holdings``.

        Yields after every AUDITED blocks, as it takes long for a large pool.
        """
        uses: dict[int, list[Owner]] = {}
        for owner, blocks in holdings:
            for block in blocks:
                uses.setdefault(block, []).append(owner)
        assert 0 not in uses, "block 0 is owned"
        assert not self._owners[0], "block 0 has owners"
        assert 0 not in self._cached, "block 0 is cached"
        assert not self._kept[0], "block 0 is kept"
        yield from self._free.audit()
        used, nobody = 0, list[Owner]()
        for block in range(1, self.num_usable + 1):
            if block % AUDITED == 0:
                yield
            owners = self._owners[block]
            wanted = uses.get(block, nobody)
            assert len(owners) == len(wanted), f"block {block} has {len(owners)} references, {len(wanted)} uses"
            if owners != wanted:
                assert Counter(owners) == Counter(wanted), f"block {block} is held by {owners}, used by {wanted}"
            used += bool(owners)
            free, cached, kept = block in self._free, block in self._cached, bool(self._kept[block])
            assert bool(owners) + cached + free == 1, f"block {block} is not in one state"
            assert kept or not cached, f"cached block {block} is not to be kept"
            assert not (kept and free), f"free block {block} is to be kept"
        assert used + len(self._cached) + len(self._free) == self.num_usable, "blocks are lost"

    def _evict(self, count: int) -> None:
        """Makes ``count`` blocks free, the longest unused first; a few more, so that they form runs."""
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} available")
        wanted = min(max(count - len(self._free), self.num_usable // EVICT_AHEAD), len(self._cached))
        blocks = [self._cached.popitem(last=False)[0] for _ in range(wanted)]
        for block in blocks:
            self._evicted(block)
            self._kept[block] = False
            self._why[block], self._since[block] = "", self.now
        self.num_evicted += wanted
        self._free.add(blocks)
