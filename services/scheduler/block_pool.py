"""Which physical KV blocks are free, and how many owners each of the others has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 1..num_blocks-1. Block 0 is padding: never owned, and outside every count here.

    A block is free or in use (reference count at least 1). Taking one out of the free list is O(1) at any place,
    because the list knows where each block sits in it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give: block 0 is padding")
        self.num_usable = num_blocks - 1
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))  # popped from the end: ascending numbers at first
        self._place = [0] * num_blocks  # index of a free block in _free
        for place, block in enumerate(self._free):
            self._place[block] = place

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int, after: int = 0) -> list[int]:
        """``count`` blocks with one reference each, continuing ``after`` where it can.

        Consecutive blocks are read faster, so each block is last + 1 if that is free. Raises ValueError when fewer
        than ``count`` are free; callers look at ``num_free`` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken: list[int] = []
        last = after
        for _ in range(count):
            following = last + 1
            free = following < len(self._references) and following > 1 and self._references[following] == 0
            last = following if free else self._free[-1]
            self._remove(last)
            self._references[last] = 1
            taken.append(last)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block; all must be in use."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each block; those without any become free. Raises ValueError at a double free."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._place[block] = len(self._free)
                self._free.append(block)

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the reference counts are exactly the uses in ``tables``."""
        uses = Counter(block for table in tables for block in table)
        assert 0 not in uses, "block 0 is owned"
        for block in range(1, self.num_usable + 1):
            count = self._references[block]
            assert count == uses[block], f"block {block} has {count} references, {uses[block]} uses"
        assert self._references[0] == 0, "block 0 has references"
        free = [block for block in range(1, self.num_usable + 1) if self._references[block] == 0]
        assert sorted(self._free) == free, "the free list is not the blocks without reference"
        assert all(self._free[self._place[block]] == block for block in free), "a free block is not at its place"

    def _remove(self, block: int) -> None:
        place, last = self._place[block], self._free.pop()
        if last != block:
            self._free[place] = last
            self._place[last] = place
