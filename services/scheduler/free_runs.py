"""Free blocks as runs of consecutive numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

AUDITED = 512  # blocks looked at in one go by the audits: some tenths of a millisecond


class FreeRuns:
    """A set of block numbers that knows its maximal runs, with O(1) additions and removals per block.

    Each end of a run knows the other, as in a boundary-tag allocator, and runs of one length are kept together. Blocks
    are only ever taken from the front of a run, so the longest length falls by at most one per block taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self._length = [0] * (num_blocks + 1)  # at both ends of a run: how long it is; within, and for others: 0
        self._free = bytearray(num_blocks + 1)
        self._starts: list[dict[int, None]] = [{} for _ in range(num_blocks + 1)]  # length → starts of such runs
        self._longest = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return bool(self._free[block])

    def add(self, blocks: Iterable[int]) -> None:
        """Blocks become free, and join the runs beside them. None may be free already."""
        free, length, starts = self._free, self._length, self._starts
        for block in blocks:
            if free[block]:
                raise ValueError(f"block {block} is free already")
            free[block] = True
            self._count += 1
            start, size = block, 1
            if free[block - 1]:
                before = length[block - 1]
                start, size = block - before, before + 1
                del starts[before][start]
            if free[block + 1]:
                after = length[block + 1]
                del starts[after][block + 1]
                size += after
            length[block] = 0
            length[start] = length[start + size - 1] = size
            starts[size][start] = None
            if size > self._longest:
                self._longest = size

    def take(self, count: int, after: int) -> list[int]:
        """Removes ``count`` blocks: ``after`` + 1 and on while free, else from the front of the longest run."""
        if count > self._count:
            raise ValueError(f"{count} blocks wanted, {self._count} free")
        taken: list[int] = []
        while len(taken) < count:
            following = after + 1
            if not (after and self._free[following] and not self._free[after]):
                while not self._starts[self._longest]:
                    self._longest -= 1
                following = next(iter(self._starts[self._longest]))
            taken += self._take_front(following, count - len(taken))
            after = taken[-1]
        return taken

    def lengths(self) -> Counter[int]:
        """How many runs there are of each length."""
        return Counter({length: len(starts) for length, starts in enumerate(self._starts) if starts})

    def audit(self) -> Iterator[None]:
        """Raises AssertionError unless the runs are exactly the maximal runs of free blocks. Yields every AUDITED."""
        start = free = runs = 0
        for block in range(len(self._free) + 1):
            if block % AUDITED == 0:
                yield
            if block < len(self._free) and self._free[block]:
                free += 1
                continue
            if size := block - start:
                runs += 1
                assert size <= self._longest, f"the run at {start} is longer than the longest"
                assert start in self._starts[size], f"the run of {size} at {start} is not kept"
                assert self._length[start] == self._length[block - 1] == size, f"the run at {start} has wrong ends"
            start = block + 1
        assert sum(map(len, self._starts)) == runs, "runs are kept that are none"
        assert free == self._count, "free blocks are miscounted"

    def _take_front(self, start: int, most: int) -> range:
        size = self._length[start]
        count = min(size, most)
        del self._starts[size][start]
        for block in range(start, start + count):
            self._free[block] = False
        self._count -= count
        self._length[start] = self._length[start + size - 1] = 0
        left = size - count
        if left:
            rest = start + count
            self._length[rest] = self._length[start + size - 1] = left
            self._starts[left][rest] = None
        return range(start, start + count)
