"""Memory behind KV blocks, shortly before they are used."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

import torch

from kernels.cpu import pages

AHEAD_BYTES = 1 << 29
AHEAD_SHARE = 4  # at most one part in this many of all blocks
NICENESS = 10


class KvPages:
    """Keeps memory behind some blocks more than have been used so far.

    The system gives a page when it is first written to. A huge page has room for thousands of tokens of one layer, so
    all layers need theirs in one step; clearing them takes some milliseconds, and in a virtual machine whose host has
    to find the memory first 150. A thread of low priority does that earlier. Blocks are given out from the first to the
    last until all have been used (``block_pool``), so the greatest number tells what comes next.
    """

    def __init__(self, kv: Sequence[torch.Tensor], ahead_bytes: int = AHEAD_BYTES) -> None:
        """kv: a tensor a layer, a block an entry. The thread ends when all is done or the process ends."""
        self._kv = kv
        self._num_blocks = len(kv[0])
        per_layer = kv[0][0].nbytes
        self._piece = max(1, pages.HUGE // per_layer)
        self._ahead = min(ahead_bytes // (per_layer * len(kv)), self._num_blocks // AHEAD_SHARE)
        self._reached = 0
        self.populated = 0  # blocks, from the first
        self._more = threading.Event()
        self._more.set()
        threading.Thread(target=self._run, name="kv pages", daemon=True).start()

    def reach(self, block: int) -> None:
        """Block ``block`` is used from now on."""
        if block > self._reached:
            self._reached = block
            self._more.set()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of a thread, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while self.populated < self._num_blocks:
            self._more.wait()
            self._more.clear()
            while self.populated < min(self._reached + 1 + self._ahead, self._num_blocks):
                piece = slice(self.populated, self.populated + self._piece)
                if not all(pages.populate(layer[piece]) for layer in self._kv):
                    return
                self.populated = min(piece.stop, self._num_blocks)
