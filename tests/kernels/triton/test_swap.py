"""Blocks between two memories, on the CPU; the stream around it needs a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from kernels.triton.swap import SwapStream, runs, swap_blocks


def memory(layers: int, blocks: int) -> list[torch.Tensor]:
    return [torch.randn(blocks, 2, 1, 16, 8) for _ in range(layers)]


def test_runs_are_maximal() -> None:
    assert list(runs([1, 2, 3, 7, 8, 4], [5, 6, 7, 8, 9, 1])) == [(1, 5, 3), (7, 8, 2), (4, 1, 1)]
    assert list(runs([1, 2], [6, 5])) == [(1, 6, 1), (2, 5, 1)]
    assert list(runs([3], [3])) == [(3, 3, 1)]
    assert list(runs([], [])) == []


def test_out_and_in_again() -> None:
    device, host = memory(2, 9), memory(2, 5)
    before = [layer.clone() for layer in device]
    swap_blocks(device, host, [3, 4, 8], [1, 2, 4])
    for layer, other in zip(before, host, strict=True):
        assert torch.equal(other[[1, 2, 4]], layer[[3, 4, 8]])
    for layer in device:
        layer[1:].fill_(float("nan"))
    swap_blocks(host, device, [4, 1, 2], [5, 7, 6])
    for layer, old in zip(device, before, strict=True):
        assert torch.equal(layer[[5, 7, 6]], old[[8, 3, 4]])
        assert torch.equal(layer[0], old[0])
        assert layer[[1, 2, 3, 4, 8]].isnan().all()


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sources in 1 layers, 1 destinations in 1"):
        swap_blocks(memory(1, 3), memory(1, 3), [1, 2], [1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_stream_of_its_own() -> None:
    device, host = [layer.cuda() for layer in memory(2, 9)], [layer.pin_memory() for layer in memory(2, 5)]
    before = [layer.clone() for layer in device]
    stream = SwapStream(device, host)
    stream.swap_out([3, 4], [1, 2]).synchronize()
    torch.cuda.current_stream().wait_event(stream.swap_in([1, 2], [7, 8]))
    for layer, old in zip(device, before, strict=True):
        assert torch.equal(layer[[7, 8]], old[[3, 4]])
