"""Writes to KV memory, whose form ``kernels.kv`` tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernels.kv import quantized
from kernels.reference.fused import rope


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    stored = (slot_mapping >= 0).nonzero().squeeze(1)
    if len(stored) < len(slot_mapping):
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    if kv.dtype == torch.int8:
        k, v = quantized(k), quantized(v)
    block_size = kv.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv[:, 0].transpose(1, 2)[blocks, offsets] = k
    kv[:, 1].transpose(1, 2)[blocks, offsets] = v


def rope_store(
    qkv: torch.Tensor, kv: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    kv_heads = kv.shape[2]
    qk, v = torch.split(qkv, [qkv.shape[1] - kv_heads, kv_heads], dim=1)
    rope(qk, cos_sin, positions)
    store_kv(qk[:, -kv_heads:], v, kv, slot_mapping)


def copy_blocks(kvs: Sequence[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor) -> None:
    for kv in kvs:
        kv.index_copy_(0, destinations, kv.index_select(0, sources))


def runs(sources: Sequence[int], destinations: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source, destination, count) of the maximal runs in which both are consecutive."""
    begin = 0
    for i in range(1, len(sources) + 1):
        together = i < len(sources) and sources[i] == sources[i - 1] + 1 and destinations[i] == destinations[i - 1] + 1
        if not together:
            yield sources[begin], destinations[begin], i - begin
            begin = i


def swap_blocks(
    source_kvs: Sequence[torch.Tensor],
    target_kvs: Sequence[torch.Tensor],
    sources: torch.Tensor,
    destinations: torch.Tensor,
) -> None:
    """Consecutive blocks go as one copy, between any two devices; queued, not waited for, where one is a GPU."""
    for source, destination, count in runs(sources.tolist(), destinations.tolist()):
        for source_kv, target_kv in zip(source_kvs, target_kvs, strict=True):
            target_kv[destination : destination + count].copy_(source_kv[source : source + count], non_blocking=True)
