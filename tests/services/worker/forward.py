"""Teacher-forced logits of our decoder for one sequence: prefill in chunks, then decoded token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.decoder import Batch
from kernels.kv import layer_shape
from services.worker.models.decoder import Decoder

BLOCK_SIZE = 16


@torch.inference_mode()
def logits(
    decoder: Decoder, ids: Sequence[int], chunks: Sequence[int], kv_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[len(ids), vocab_size] float32. The first sum(chunks) tokens are prefilled in those chunks, the rest decoded."""
    config, dtype = decoder.config, kv_dtype or decoder.embedding.dtype
    count = -(-len(ids) // BLOCK_SIZE)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 1
    shape = layer_shape(count + 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim, dtype)
    rubbish = -1 if dtype == torch.int8 else float("nan")  # a scale of such bytes is NaN
    kv = [torch.full(shape, rubbish, dtype=dtype) for _ in decoder.layers]
    for layer in kv:
        layer[0] = 0
    rows, start = [], 0
    for size in [*chunks, *[1] * (len(ids) - sum(chunks))]:
        decoding = start >= sum(chunks)
        positions = torch.arange(start, start + size)
        table, length = order.int().unsqueeze(0), torch.tensor([start + size], dtype=torch.int32)
        batch = Batch(
            tokens=torch.tensor(ids[start : start + size]),
            positions=positions,
            slot_mapping=order[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            decode_tables=table if decoding else table[:0],
            decode_lens=length if decoding else length[:0],
            chunk_tables=table[:0] if decoding else table,
            chunk_cu_seqlens=torch.tensor([0] if decoding else [0, size], dtype=torch.int32),
            chunk_lens=length[:0] if decoding else length,
        )
        rows.append(decoder.step(batch, kv, torch.arange(size))[0].float())
        start += size
    return torch.cat(rows)
