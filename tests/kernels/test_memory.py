"""Stores and block copies, slot by slot against plain indexing."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import select

ops = select(torch.device("cpu"), "reference")


def test_store_puts_each_token_in_its_slot_and_skips_minus_one() -> None:
    kv = torch.full((4, 2, 3, 16, 64), 7.0)
    k, v = torch.randn(4, 3, 64), torch.randn(4, 3, 64)
    ops.store_kv(k, v, kv, torch.tensor([17, -1, 63, 2 * 16]))
    wanted = torch.full_like(kv, 7.0)
    for token, (block, offset) in {0: (1, 1), 2: (3, 15), 3: (2, 0)}.items():
        wanted[block, 0, :, offset] = k[token]
        wanted[block, 1, :, offset] = v[token]
    assert torch.equal(kv, wanted)


def test_store_refuses_another_dtype() -> None:
    kv = torch.zeros(2, 2, 1, 16, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"k is torch.float32, not torch.bfloat16"):
        ops.store_kv(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), kv, torch.tensor([16]))


def test_copy_moves_whole_blocks_of_every_layer() -> None:
    kvs = [torch.randn(6, 2, 2, 16, 64) for _ in range(3)]
    before = [kv.clone() for kv in kvs]
    ops.copy_blocks(kvs, torch.tensor([1, 1, 4]), torch.tensor([2, 5, 3]))
    for kv, old in zip(kvs, before, strict=True):
        for block, source in enumerate([0, 1, 1, 4, 4, 1]):
            assert torch.equal(kv[block], old[source])
