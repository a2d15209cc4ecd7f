"""Stores and block moves: the same cases on every implementation, slot by slot against plain indexing."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import UnavailableError
from kernels.ops import Kernels, select
from kernels.reference.memory import runs
from tests.kernels.oracle import DTYPES, cos_sin, rotated

UNTOUCHED = 7.0
# KV heads, head_dim, block_size
SHAPES = pytest.mark.parametrize(("kv_heads", "head_dim", "block_size"), [(3, 80, 16), (1, 128, 32), (2, 64, 1)])
TURNING = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def memory_for(ops: Kernels, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """KV memory of 64 slots, all UNTOUCHED."""
    try:
        ops.check_kv(block_size, head_dim)
    except UnavailableError as error:
        pytest.skip(str(error))
    return torch.full((64 // block_size, 2, kv_heads, block_size, head_dim), UNTOUCHED, dtype=dtype)


def by_slot(kv: torch.Tensor) -> torch.Tensor:
    """[slots, 2, K, D]"""
    return kv.cpu().permute(0, 3, 1, 2, 4).flatten(0, 1)


def some_slots(count: int) -> torch.Tensor:
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:count]
    slots[count // 2] = -1
    return slots


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_store_puts_each_token_in_its_slot_and_skips_minus_one(
    ops: Kernels, device: torch.device, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    kv, slots = memory_for(ops, kv_heads, head_dim, block_size, dtype).to(device), some_slots(20)
    fused = torch.randn(20, 2 * kv_heads + 4, head_dim).to(dtype)  # queries in front, as in a projection
    k, v = fused[:, 4 : 4 + kv_heads], fused[:, 4 + kv_heads :]
    on_device = fused.to(device)
    ops.store_kv(on_device[:, 4 : 4 + kv_heads], on_device[:, 4 + kv_heads :], kv, slots.to(device))
    expected = torch.full((64, 2, kv_heads, head_dim), UNTOUCHED, dtype=dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot] = torch.stack([k[token], v[token]])
    assert torch.equal(by_slot(kv), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@SHAPES
def test_rope_store_rotates_queries_in_place_and_stored_keys(
    ops: Kernels, device: torch.device, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    kv, slots = memory_for(ops, kv_heads, head_dim, block_size, dtype).to(device), some_slots(9)
    heads, table, positions = 3 * kv_heads, cos_sin(40, head_dim), torch.arange(20, 29)
    qkv = torch.randn(9, heads + 2 * kv_heads, head_dim).to(dtype)
    on_device = qkv.to(device, copy=True)
    ops.rope_store(on_device, kv, table.to(device), positions.to(device), slots.to(device))
    turned = rotated(qkv[:, : heads + kv_heads], table, positions)
    queries = on_device[:, :heads].cpu().double()
    torch.testing.assert_close(queries, turned[:, :heads], rtol=TURNING[dtype], atol=TURNING[dtype])
    stored, untouched = by_slot(kv), torch.ones(64, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key = stored[slot, 0].double()
            torch.testing.assert_close(key, turned[token, heads:], rtol=TURNING[dtype], atol=TURNING[dtype])
            assert torch.equal(stored[slot, 1], qkv[token, heads + kv_heads :])
            untouched[slot] = False
    assert (stored[untouched] == UNTOUCHED).all()


def test_store_refuses_another_dtype() -> None:
    kv = torch.zeros(2, 2, 1, 16, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"k is torch.float32, not torch.bfloat16"):
        select(torch.device("cpu"), "reference").store_kv(
            torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), kv, torch.tensor([16])
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_moves_whole_blocks_of_every_layer(ops: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    layers = [torch.randn(6, 2, 3, 16, 80).to(dtype).to(device) for _ in range(2)]  # more than a program of Triton's
    before = [layer.clone() for layer in layers]
    ops.copy_blocks(layers, torch.tensor([1, 1, 5], device=device), torch.tensor([2, 4, 0], device=device))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old[[5, 1, 1, 3, 1, 5]])


def test_runs_are_maximal() -> None:
    assert list(runs([1, 2, 3, 7, 8, 4], [5, 6, 7, 8, 9, 1])) == [(1, 5, 3), (7, 8, 2), (4, 1, 1)]
    assert list(runs([1, 2], [6, 5])) == [(1, 6, 1), (2, 5, 1)]
    assert list(runs([3], [3])) == [(3, 3, 1)]
    assert list(runs([], [])) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_to_another_memory_and_in_again(ops: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    layers = [torch.randn(9, 2, 1, 16, 8).to(dtype).to(device) for _ in range(2)]
    host = [torch.full((5, 2, 1, 16, 8), UNTOUCHED, dtype=dtype) for _ in range(2)]
    before = [layer.clone() for layer in layers]
    ops.swap_blocks(layers, host, torch.tensor([3, 4, 8]), torch.tensor([1, 2, 4]))
    if device.type == "cuda":
        torch.cuda.synchronize()  # copies are queued
    for layer, other in zip(before, host, strict=True):
        assert torch.equal(other[[1, 2, 4]], layer[[3, 4, 8]].cpu())
        assert (other[[0, 3]] == UNTOUCHED).all()
    for layer in layers:
        layer[1:].fill_(float("nan"))
    ops.swap_blocks(host, layers, torch.tensor([4, 1, 2]), torch.tensor([5, 7, 6]))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[5, 7, 6]], old[[8, 3, 4]])
        assert torch.equal(layer[0], old[0])
        assert layer[[1, 2, 3, 4, 8]].isnan().all()


def test_moves_that_do_not_fit_are_refused() -> None:
    ops = select(torch.device("cpu"), "reference")
    memory, smaller = [torch.zeros(4, 2, 1, 16, 8)], [torch.zeros(4, 2, 1, 8, 8)]
    one, two = torch.tensor([1]), torch.tensor([1, 2])
    pairs = torch.tensor([1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"destinations has shape \(1,\), not \(2,\)"):
        ops.swap_blocks(memory, memory, two, one)
    with pytest.raises(ValueError, match=r"target has shape .*, not \(4, 2, 1, 16, 8\)"):
        ops.swap_blocks(memory, smaller, one, one)
    with pytest.raises(ValueError, match="target_kvs has 2 layers, not 1"):
        ops.swap_blocks(memory, memory * 2, one, one)
    with pytest.raises(ValueError, match="sources has stride 2, not 1"):  # kernels read the numbers one by one
        ops.copy_blocks(memory, pairs[::2], pairs[1::2])


def test_nothing_to_do(ops: Kernels, device: torch.device) -> None:
    kv, none = torch.zeros(2, 2, 1, 16, 64, device=device), torch.empty(0, dtype=torch.int64, device=device)
    rows = torch.empty(0, 1, 64, device=device)
    ops.store_kv(rows, rows, kv, none)
    ops.rope_store(torch.empty(0, 4, 64, device=device), kv, torch.zeros(4, 64, device=device), none, none)
    ops.copy_blocks([kv], none, none)
    assert not kv.any()
