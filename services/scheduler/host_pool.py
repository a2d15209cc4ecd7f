"""Blocks of the host's memory, the tier below the device: who holds each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from services.scheduler.free_runs import AUDITED


class HostPool:
    """Blocks 0..num_blocks-1; a block is free until it is allocated and again when its last holder lets go of it."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Blocks with one holder each. Raises ValueError when fewer are free; callers look at ``num_free`` first."""
        if count > len(self._free):
            raise ValueError(f"{count} host blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block. Raises ValueError for a free one."""
        for block in blocks:
            if not self._holders[block]:
                raise ValueError(f"host block {block} is free and cannot be shared")
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each block. Raises ValueError at a double free."""
        for block in blocks:
            if not self._holders[block]:
                raise ValueError(f"host block {block} is free already")
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def audit(self, holdings: Iterable[Iterable[int]]) -> Iterator[None]:
        """Raises AssertionError unless the holders are exactly those in ``holdings``. Yields every AUDITED blocks."""
        uses = Counter(block for blocks in holdings for block in blocks)
        free = set(self._free)
        assert len(free) == len(self._free), "a host block is free twice"
        for block, count in enumerate(self._holders):
            if block % AUDITED == 0:
                yield
            assert count == uses[block], f"host block {block} has {count} holders, {uses[block]} uses"
            assert (block in free) == (not count), f"host block {block} is free and held, or neither"
