"""The tile table: how many rows, tokens, warps and pipeline stages each attention kernel gets on each device.

There is no autotuning: what runs is what ``python -m kernels.aot`` compiles and checks on every change.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def device_class() -> str:
    """The table's column for the active device: ``hopper``, ``ampere``, ``cdna`` or ``interpreter``.

    ``ampere`` stands for every NVIDIA device whose blocks may have 99 KiB of shared memory or more; ``hopper`` for
    those with 227 KiB; ``cdna`` for AMD's with 64 KiB.
    """
    if knobs.runtime.interpret:
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "cdna"
    return "hopper" if 90 <= target.arch < 120 else "ampere"


def decode_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """For one query token a sequence, and for chunks of a few tokens. 16 rows: the least a tensor core takes."""
    device = device_class()
    if device == "interpreter":
        return Tile(16, 32, 1, 1)
    if dtype == torch.float32:
        return Tile(16, 32, 4, 2) if head_dim <= 64 else Tile(16, 16, 8, 2)
    if device == "cdna":
        return Tile(16, 32, 4, 2)
    return Tile(16, 64, 4, 3) if head_dim <= 128 else Tile(16, 32, 8, 2)


def prefill_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """For prompts and their chunks. 128 rows of 16-bit values let Hopper's eight warps use wgmma."""
    device = device_class()
    if device == "interpreter":
        return Tile(32, 32, 1, 1)
    if dtype == torch.float32:
        return Tile(32, 32 if head_dim <= 64 else 16, 8, 2 if head_dim <= 128 else 1)
    if device == "cdna":
        return Tile(64, 32, 4, 2) if head_dim <= 128 else Tile(64, 32, 8, 1)
    return Tile(128, 64, 8, 3) if head_dim <= 128 else Tile(64, 32, 8, 2)
