"""Shapes of real models, KV memory of random sequences, and float64 attention over it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qk_norm: bool

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


SMOLLM2 = Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, False)
QWEN3 = Shape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, True)
OTHERS = (
    Shape("D80 group 4", 1, 640, 8, 2, 80, 1024, 1000, False),
    Shape("D96 group 1", 1, 384, 4, 4, 96, 1024, 1000, False),
    Shape("D256 group 16", 1, 4096, 16, 1, 256, 1024, 1000, False),
)
TINY = Shape("tiny", 2, 96, 6, 2, 16, 160, 320, True)


class Memory:
    """One layer's KV of sequences of the given lengths in shuffled blocks; all but live tokens is NaN."""

    def __init__(self, shape: Shape, lengths: list[int], dtype: torch.dtype, device: torch.device) -> None:
        counts = [-(-length // BLOCK) for length in lengths]
        blocks = (torch.randperm(sum(counts), device=device) + 1).split(counts)
        tail = (2, shape.kv_heads, BLOCK, shape.head_dim)
        self.kv = torch.randn((sum(counts) + 1, *tail), dtype=dtype, device=device)
        self.kv[0] = 0
        self.table = torch.full((len(lengths), max([*counts, 1])), 1 << 30, dtype=torch.int32, device=device)
        for row, (length, owned) in enumerate(zip(lengths, blocks, strict=True)):
            self.table[row, : len(owned)] = owned
            if length % BLOCK:
                self.kv[owned[-1], :, :, length % BLOCK :] = math.nan
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=device)

    def gathered(self, row: int) -> torch.Tensor:
        """[2, K, length, D] of one sequence."""
        length = int(self.lens[row])
        owned = self.kv[self.table[row, : -(-length // BLOCK)].long()]
        return owned.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]


def oracle(q: torch.Tensor, memory: Memory, row: int, scale: float) -> torch.Tensor:
    """float64 attention of the last ``len(q)`` tokens, q [T, H, D]."""
    keys, values = memory.gathered(row).double()
    group = q.shape[1] // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    length = keys.shape[1]
    at = torch.arange(length - len(q), length, device=q.device)[:, None]
    hidden = torch.arange(length, device=q.device)[None] > at
    scores = (q.transpose(0, 1).double() @ keys.transpose(1, 2) * scale).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)
