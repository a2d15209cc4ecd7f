"""Stores and block copies against plain indexing."""

from __future__ import annotations

import pytest
import torch

import kernels.triton as kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOTS = [17, -1, 0, 63, 48]


def stored(kv: torch.Tensor, slot: int) -> torch.Tensor:
    """[2, K, D]: key and value in a slot."""
    return kv[slot // kv.shape[3], :, :, slot % kv.shape[3]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(3, 80, 16), (1, 128, 32), (8, 64, 64)])
def test_store(kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    fused = torch.randn(len(SLOTS), 2 * kv_heads + 4, head_dim).to(dtype)  # queries in front, as in a projection
    k, v = fused[:, 4 : 4 + kv_heads], fused[:, 4 + kv_heads :]
    kv = torch.full((64 // block_size, 2, kv_heads, block_size, head_dim), 7.0, dtype=dtype, device=device)
    on_device = fused.to(device)
    kernels.store_kv(
        on_device[:, 4 : 4 + kv_heads], on_device[:, 4 + kv_heads :], kv, torch.tensor(SLOTS, device=device)
    )
    for slot in range(64):
        wanted = torch.full((2, kv_heads, head_dim), 7.0, dtype=dtype)
        if slot in SLOTS:
            wanted = torch.stack([k[SLOTS.index(slot)], v[SLOTS.index(slot)]])
        assert torch.equal(stored(kv, slot).cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 80), (1, 1, 128)])
def test_rope_and_store_at_once(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = torch.randn(len(SLOTS), heads + 2 * kv_heads, head_dim).to(dtype).to(device)
    before = qkv.clone()
    angles = torch.rand(100, head_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    positions = torch.tensor([0, 99, 5, 5, 42], device=device)
    slots = torch.tensor(SLOTS, device=device)

    wanted, wanted_kv = qkv.clone(), torch.zeros(4, 2, kv_heads, 16, head_dim, dtype=dtype, device=device)
    kernels.rope(wanted[:, : heads + kv_heads], cos_sin, positions)
    kernels.store_kv(wanted[:, heads : heads + kv_heads], wanted[:, heads + kv_heads :], wanted_kv, slots)

    kv = torch.zeros_like(wanted_kv)
    kernels.rope_store(qkv, kv, cos_sin, positions, slots)
    assert torch.equal(qkv[:, :heads], wanted[:, :heads])
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    assert torch.equal(kv, wanted_kv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_blocks(dtype: torch.dtype, device: torch.device) -> None:
    layers = [torch.randn(6, 2, 3, 16, 80).to(dtype).to(device) for _ in range(2)]  # more words than one program moves
    before = [layer.clone() for layer in layers]
    kernels.copy_blocks(layers, torch.tensor([1, 1, 5], device=device), torch.tensor([2, 4, 0], device=device))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old[[5, 1, 1, 3, 1, 5]])


def test_nothing_to_do(device: torch.device) -> None:
    kv, none = torch.zeros(2, 2, 1, 16, 64, device=device), torch.empty(0, dtype=torch.int64, device=device)
    rows = torch.empty(0, 1, 64, device=device)
    kernels.store_kv(rows, rows, kv, none)
    kernels.rope_store(torch.empty(0, 4, 64, device=device), kv, torch.zeros(4, 64, device=device), none, none)
    kernels.copy_blocks([kv], none, none)
    assert not kv.any()
