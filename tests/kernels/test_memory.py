"""Stores and block copies, slot by slot against plain indexing."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import UnavailableError
from kernels.ops import Kernels, select
from kernels.reference.memory import runs

ops = select(torch.device("cpu"), "reference")


@pytest.fixture(params=["reference", "cpu"])
def either(request: pytest.FixtureRequest) -> Kernels:
    try:
        return select(torch.device("cpu"), request.param)
    except UnavailableError as error:
        pytest.skip(str(error))


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


def test_runs_are_maximal() -> None:
    assert list(runs([1, 2, 3, 7, 8, 4], [5, 6, 7, 8, 9, 1])) == [(1, 5, 3), (7, 8, 2), (4, 1, 1)]
    assert list(runs([1, 2], [6, 5])) == [(1, 6, 1), (2, 5, 1)]
    assert list(runs([3], [3])) == [(3, 3, 1)]
    assert list(runs([], [])) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_to_another_memory_and_in_again(either: Kernels, dtype: torch.dtype) -> None:
    device = [torch.randn(9, 2, 1, 16, 8).to(dtype) for _ in range(2)]
    host = [torch.full((5, 2, 1, 16, 8), 7.0, dtype=dtype) for _ in range(2)]
    before = [layer.clone() for layer in device]
    either.swap_blocks(device, host, torch.tensor([3, 4, 8]), torch.tensor([1, 2, 4]))
    for layer, other in zip(before, host, strict=True):
        assert torch.equal(other[[1, 2, 4]], layer[[3, 4, 8]])
        assert (other[[0, 3]] == 7).all()
    for layer in device:
        layer[1:].fill_(float("nan"))
    either.swap_blocks(host, device, torch.tensor([4, 1, 2]), torch.tensor([5, 7, 6]))
    for layer, old in zip(device, before, strict=True):
        assert torch.equal(layer[[5, 7, 6]], old[[8, 3, 4]])
        assert torch.equal(layer[0], old[0])
        assert layer[[1, 2, 3, 4, 8]].isnan().all()


def test_moves_that_do_not_fit_are_refused() -> None:
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
