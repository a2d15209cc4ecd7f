"""Writes to KV memory ``kv [num_blocks, 2, K, block_size, D]``: new tokens, and copies of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.triton.lang import cast

_COPY_WORDS = 4096  # int32 a program of copy_kernel moves


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def store_kernel(
    k,
    v,
    kv,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    kv_block_stride,
    kv_part_stride,
    kv_head_stride,
    kv_token_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program t copies token t's key and value of every KV head to slot ``slot_mapping[t]``; -1 stores nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PAD)[:, None]
    element = tl.arange(0, HEAD_PAD)[None, :]
    mask = (head < HEADS) & (element < HEAD_DIM)
    place = (slot // BLOCK_SIZE) * kv_block_stride + (slot % BLOCK_SIZE) * kv_token_stride
    target = kv + place + head * kv_head_stride + element
    tl.store(target, tl.load(k + token * k_token_stride + head * k_head_stride + element, mask=mask), mask=mask)
    tl.store(
        target + kv_part_stride,
        tl.load(v + token * v_token_stride + head * v_head_stride + element, mask=mask),
        mask=mask,
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def rope_store_kernel(
    qkv,
    kv,
    cos_sin,
    positions,
    slot_mapping,
    token_stride,
    head_stride,
    kv_block_stride,
    kv_part_stride,
    kv_head_stride,
    kv_token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (t, h) rotates query head h of token t in place, or rotates key head h - HEADS and stores it with its
    value. The rotation is ``kernels.triton.fused.rope_kernel``'s."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    element = tl.arange(0, HALF_PAD)
    mask = element < half
    row = cos_sin + tl.load(positions + token) * HEAD_DIM + element
    cos = tl.load(row, mask=mask, other=0.0)
    sin = tl.load(row + half, mask=mask, other=0.0)
    source = qkv + token * token_stride + head * head_stride + element
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    turned_first = cast(first * cos - second * sin, qkv.dtype.element_ty)
    turned_second = cast(second * cos + first * sin, qkv.dtype.element_ty)
    if head < HEADS:
        tl.store(source, turned_first, mask=mask)
        tl.store(source + half, turned_second, mask=mask)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            place = (slot // BLOCK_SIZE) * kv_block_stride + (slot % BLOCK_SIZE) * kv_token_stride
            target = kv + place + (head - HEADS) * kv_head_stride + element
            tl.store(target, turned_first, mask=mask)
            tl.store(target + half, turned_second, mask=mask)
            value = source + KV_HEADS * head_stride
            tl.store(target + kv_part_stride, tl.load(value, mask=mask), mask=mask)
            tl.store(target + kv_part_stride + half, tl.load(value + half, mask=mask), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["sources", "destinations"])
def copy_kernel(memory, sources, destinations, block_words, WORDS: tl.constexpr):
    """Program (i, part) copies one part of block ``sources[i]`` over block ``destinations[i]``, as int32 words."""
    pair = tl.program_id(0)
    source = tl.load(sources + pair) * block_words
    destination = tl.load(destinations + pair) * block_words
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = word < block_words
    tl.store(memory + destination + word, tl.load(memory + source + word, mask=mask), mask=mask)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes token t's ``k, v [T, K, D]`` to slot ``slot_mapping[t]``; see ``kernels.ops``."""
    if not len(slot_mapping):
        return
    _, _, heads, block_size, head_dim = kv.shape
    store_kernel[(len(slot_mapping),)](
        k, v, kv, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads),
        HEAD_DIM=head_dim, HEAD_PAD=triton.next_power_of_2(head_dim), BLOCK_SIZE=block_size, num_warps=1,
    )  # fmt: skip


def rope_store(
    qkv: torch.Tensor, kv: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """``rope`` of queries and keys and ``store_kv`` in one pass over ``qkv [T, H + 2 K, D]``.

    Queries are rotated in place; keys are rotated on their way to ``kv`` and left as they were in ``qkv``. cos_sin:
    [max_position, D] float32; positions and slot_mapping: [T] int64, slot -1 stores nothing.
    """
    tokens, all_heads, head_dim = qkv.shape
    if not tokens:
        return
    kv_heads, block_size = kv.shape[2], kv.shape[3]
    rope_store_kernel[(tokens, all_heads - kv_heads)](
        qkv, kv, cos_sin, positions, slot_mapping, qkv.stride(0), qkv.stride(1),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        HEADS=all_heads - 2 * kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        HALF_PAD=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=block_size, num_warps=1,
    )  # fmt: skip


def copy_blocks(kvs: Sequence[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copies block ``sources[i]`` over ``destinations[i]`` (both [P] int64) in every layer; see ``kernels.ops``."""
    if not len(sources):
        return
    for kv in kvs:
        memory = kv.view(torch.int32)
        block_words = memory.stride(0)
        copy_kernel[(len(sources), triton.cdiv(block_words, _COPY_WORDS))](
            memory, sources, destinations, block_words, WORDS=_COPY_WORDS, num_warps=4
        )
