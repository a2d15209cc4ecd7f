"""Memory behind KV blocks as the system tells it, while a run reaches further and further."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kernels.cpu import pages
from services.worker.kv_pages import KvPages
from tests.kernels.cpu.mapped import resident

MIB = 1 << 20


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def test_memory_stays_ahead_of_what_is_used_in_every_layer() -> None:
    kv = [pages.empty((64, MIB), torch.uint8) for _ in range(3)]  # 64 blocks of a mebibyte a layer: two a huge page
    watched = KvPages(kv, ahead_bytes=3 * 8 * MIB)
    wait_for("blocks 0 and 8 ahead", lambda: watched.populated >= 9)
    assert watched.populated <= 10
    assert all(9 * MIB <= resident(layer) <= 12 * MIB for layer in kv)
    watched.reach(20)
    wait_for("up to 20 and 8 ahead", lambda: watched.populated >= 29)
    watched.reach(5)  # lower numbers come again
    watched.reach(63)
    wait_for("all", lambda: watched.populated == 64)
    assert all(resident(layer) == 64 * MIB for layer in kv)


def test_a_small_pool_is_not_filled_by_what_is_kept_ahead() -> None:
    kv = [pages.empty((40, 2 * MIB), torch.uint8)]
    watched = KvPages(kv)
    wait_for("a quarter ahead", lambda: watched.populated >= 11)
    assert watched.populated == 11
