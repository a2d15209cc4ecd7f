"""What kernels compute, in float64: attention over keys and values kept per sequence, rotation by complex numbers.

And the paged memory that holds the same keys and values. Whatever it holds beside live tokens is NaN, and so is what a
window has left behind; tables end in numbers far outside: a kernel that reads either shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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

    def rows(self, rows: Sequence[int]) -> Paged:
        """Some of the sequences, over the same memory."""
        keys, values = [self.keys[row] for row in rows], [self.values[row] for row in rows]
        return Paged(self.kv, self.block_table[rows], self.seq_lens[rows], keys, values)


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


def decoded(q: torch.Tensor, memory: Paged, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    """Attention of one query a sequence, ``q [S, H, D]``; zeros for sequences without tokens."""
    return prefilled(q, [1] * len(q), memory, window, softcap)


def prefilled(
    q: torch.Tensor, new: Sequence[int], memory: Paged, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """Attention of the last new[i] tokens of each sequence i, ``q [sum(new), H, D]``."""
    rows = zip(q.split(list(new)), memory.keys, memory.values, strict=True)
    parts = [
        attention(part, keys, values, window, softcap) if len(keys) else torch.zeros(part.shape, dtype=torch.float64)
        for part, keys, values in rows
    ]
    return torch.cat(parts)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Results of attention: within the tolerance of their dtype everywhere, and on average well within it."""
    assert actual.isfinite().all()
    error = (actual.double() - expected).abs()
    assert error.max() < TOLERANCE[actual.dtype], f"largest error {error.max():.2e}"
    assert error.mean() < TOLERANCE[actual.dtype] / 4


def cos_sin(positions: int, head_dim: int) -> torch.Tensor:
    """[positions, head_dim] float32: cosines, then sines, of the usual frequencies."""
    angles = torch.arange(positions).double()[:, None] / 10000 ** (torch.arange(0, head_dim, 2).double() / head_dim)
    return torch.cat([angles.cos(), angles.sin()], -1).float()


def rotated(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows ``x [T, heads, D]`` turned by their positions in a table of ``cos_sin``, in float64."""
    real, imaginary = x.double().chunk(2, -1)
    cos, sin = table[positions][:, None].double().chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag], -1)
