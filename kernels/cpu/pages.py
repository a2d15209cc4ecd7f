"""Memory in huge pages, where the system gives them: a step reads all weights once, and with pages of 4 KiB looking up
addresses is a good part of that."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

HUGE = 1 << 21
_CHUNK = 1 << 26
_POPULATE_WRITE = 23  # Linux's MADV_POPULATE_WRITE, which mmap has no name for


def populate(memory: torch.Tensor) -> bool:
    """Has the system put memory behind a contiguous tensor, whose contents stay; other threads run meanwhile. Without
    this a page comes when it is first written to. False where the system is older than Linux 5.14 or has no memory."""
    begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = memory.data_ptr() + memory.nbytes
    done: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _POPULATE_WRITE)
    return done == 0


class Pages:
    """Gives out pieces of large mappings. A mapping is given back with the last tensor in it; what was never written to
    takes no memory."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """[size] uint8 at a multiple of 64 bytes."""
        if size > len(self._chunk):
            self._chunk = _mapped(max(size, _CHUNK))
        taken = self._chunk[:size]
        self._chunk = self._chunk[(size + 63) // 64 * 64 :]
        return taken


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a mapping of its own. Raises OSError when there is no memory."""
    return _mapped(math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))


def _mapped(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE
    return whole[begin : begin + size]
