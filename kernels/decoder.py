"""A whole decoder as one operation: what goes in, and what a backend that runs it at once is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one forward pass: D decode rows of one token each, then the tokens of C prefill chunks.

    tokens, positions, slot_mapping: [T] int64. Decode tables [D, max_blocks] int32 and lengths [D] int32; chunk tables,
    cu_seqlens [C + 1] and lengths likewise. Lengths include the batch's own tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decode_tables: torch.Tensor
    decode_lens: torch.Tensor
    chunk_tables: torch.Tensor
    chunk_cu_seqlens: torch.Tensor
    chunk_lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Norms [hidden], or [head_dim] for those of queries and keys; linear layers as ``Kernels.linear`` made them."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    window: int


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """embedding [vocabulary, hidden]; cos_sin as in ``Kernels.rope``; scale of attention scores."""

    layers: Sequence[LayerParts]
    embedding: torch.Tensor
    norm: torch.Tensor
    head: Linear
    cos_sin: torch.Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


class FusedDecoder(Protocol):
    """A forward pass in one call."""

    def takes(self, kv: torch.Tensor) -> bool:
        """Whether it can run over KV memory of this shape and dtype."""
        ...

    def __call__(
        self,
        batch: Batch,
        kv: Sequence[torch.Tensor],
        samples: torch.Tensor,
        likeliest: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Stores the batch's keys and values in ``kv`` (one a layer) and returns logits [len(samples), vocabulary] of
        rows ``samples`` (int64) of the batch, and seconds by part. likeliest, [len(samples)] int64, gets the ids of
        their largest logits."""
        ...
