"""Attention in float64 over keys and values kept per sequence, and the paged memory that holds the same.

Whatever paged memory holds beside live tokens is NaN, and so is what a window has left behind: a kernel that reads it
shows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """q [T, H, D] are the last T tokens of keys, values [N, K, D]; scores are scaled by D ** -0.5. float64."""
    tokens, heads, head_dim = q.shape
    length, group = len(keys), heads // keys.shape[1]
    keys = keys.double().repeat_interleave(group, dim=1)
    values = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,nhd->htn", q.double(), keys) / math.sqrt(head_dim)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(length - tokens, length)[:, None]
    key = torch.arange(length)[None]
    hidden = key > at
    if window:
        hidden |= key <= at - window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, values)


@dataclass
class Paged:
    """Sequences with random keys and values in shuffled blocks."""

    kv: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def paged(
    lengths: list[int],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    hidden: list[int] | None = None,
    seed: int = 0,
) -> Paged:
    """hidden: of each sequence, how many first tokens are out of every query's sight (and NaN)."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    width = max([*counts, 1]) + 2
    total = sum(counts) + 3
    kv = torch.full((total, 2, kv_heads, block_size, head_dim), math.nan, dtype=dtype)
    kv[0] = 0
    table = torch.full((len(lengths), width), 1 << 30, dtype=torch.int32)  # beyond its blocks: far outside
    free = (torch.randperm(total - 1, generator=generator) + 1).tolist()
    keys, values = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        k, v = torch.randn((2, length, kv_heads, head_dim), generator=generator).to(dtype)
        for t in range(hidden[row] if hidden else 0, length):
            kv[blocks[t // block_size], 0, :, t % block_size] = k[t]
            kv[blocks[t // block_size], 1, :, t % block_size] = v[t]
        keys.append(k)
        values.append(v)
    return Paged(kv, table, torch.tensor(lengths, dtype=torch.int32), keys, values)


def queries(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn((tokens, heads, head_dim), generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance everywhere, and on average well within it."""
    assert actual.isfinite().all()
    error = (actual.double() - expected).abs()
    assert error.max() < TOLERANCE[dtype], f"largest error {error.max():.2e}"
    assert error.mean() < TOLERANCE[dtype] / 4
