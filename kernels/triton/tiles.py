"""The tile table: how many rows, tokens, warps and pipeline stages each attention kernel gets on each device.

There is no autotuning: what runs is what ``python -m kernels.aot`` compiles and checks on every change. On NVIDIA
devices every tile fits into 99 KiB of shared memory, which all since Ampere have; on AMD's into 64 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton import knobs


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: (query token, query head) pairs of one KV head. tokens: keys and values read at a time."""

    rows: int
    tokens: int
    warps: int
    stages: int


@cache
def backend() -> str:
    """``cuda``, ``hip``, or ``interpreter``, whose tiles are small because its time is. Asking takes longer than a
    launch does, so it is asked once."""
    if knobs.runtime.interpret:
        return "interpreter"
    return str(triton.runtime.driver.active.get_current_target().backend)


def decode_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """For one query token a sequence, and for chunks of a few tokens. 16 rows: the least a tensor core takes."""
    kind = backend()
    if kind == "interpreter":
        return Tile(16, 32, 1, 1)
    if dtype == torch.float32:
        return Tile(16, 32, 4, 2) if head_dim <= 64 else Tile(16, 16, 8, 2 if head_dim <= 128 else 1)
    if kind == "hip":
        return Tile(16, 32, 4, 2)
    if head_dim <= 128:
        return Tile(16, 64, 4, 2 if head_dim <= 64 else 3)
    return Tile(16, 32, 8, 2)


def prefill_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """For prompts and their chunks. 128 rows of 16-bit values let Hopper's eight warps use wgmma."""
    kind = backend()
    if kind == "interpreter":
        return Tile(32, 32, 1, 1)
    if dtype == torch.float32:
        return Tile(32, 32 if head_dim <= 64 else 16, 8, 2 if head_dim <= 128 else 1)
    if kind == "hip":
        return Tile(64, 32, 4, 2) if head_dim <= 128 else Tile(64, 32, 8, 1)
    return Tile(128, 64, 8, 3) if head_dim <= 128 else Tile(64, 32, 8, 2)
