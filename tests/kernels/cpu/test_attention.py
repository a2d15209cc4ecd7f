"""Attention where the CPU kernels have forms of their own: register tiles for each number of rows and head size, key
tiles of 128 tokens, chunks of 512, and any number of threads."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from kernels.cpu.kernels import CpuKernels
from tests.kernels.oracle import DTYPES, Paged, assert_close, decoded, paged, prefilled, queries

TILES = pytest.mark.parametrize(
    ("group", "head_dim"),
    [(group, head_dim) for head_dim in (16, 32, 48, 64, 80, 96, 128, 256) for group in (1, 3, 4, 7)],
)


def decode(kernels: CpuKernels, q: torch.Tensor, memory: Paged, window: int = 0) -> torch.Tensor:
    return kernels.paged_decode(q, memory.kv, memory.block_table, memory.seq_lens, q.shape[2] ** -0.5, window, 0.0)


def prefill(kernels: CpuKernels, q: torch.Tensor, new: list[int], memory: Paged, window: int = 0) -> torch.Tensor:
    bounds = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    scale = q.shape[2] ** -0.5
    return kernels.paged_prefill(q, memory.kv, memory.block_table, bounds, memory.seq_lens, scale, window, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@TILES
def test_decode_by_every_tile(kernels: CpuKernels, dtype: torch.dtype, group: int, head_dim: int) -> None:
    memory = paged([1, 15, 16, 17, 130], 2, head_dim, 16, dtype)
    q = queries(5, 2 * group, head_dim, dtype)
    assert_close(decode(kernels, q, memory), decoded(q, memory))


@pytest.mark.parametrize("dtype", DTYPES)
@TILES
def test_prefill_by_every_tile(kernels: CpuKernels, dtype: torch.dtype, group: int, head_dim: int) -> None:
    new = [1, 20, 150]
    memory = paged(new, 2, head_dim, 16, dtype)
    q = queries(sum(new), 2 * group, head_dim, dtype)
    assert_close(prefill(kernels, q, new, memory), prefilled(q, new, memory))


@pytest.mark.parametrize("window", [0, 64, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_several_chunks(kernels: CpuKernels, dtype: torch.dtype, window: int) -> None:
    lengths = [511, 512, 513, 1024, 1500, 2]
    memory = paged(lengths, 2, 64, 16, dtype, hidden=[max(0, n - window) if window else 0 for n in lengths])
    q = queries(6, 6, 64, dtype)
    assert_close(decode(kernels, q, memory, window), decoded(q, memory, window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("new", [1, 2, 7, 33, 130])
def test_prefill_after_cached_tokens(kernels: CpuKernels, dtype: torch.dtype, cached: int, new: int) -> None:
    memory = paged([cached + new], 2, 64, 16, dtype)
    q = queries(new, 6, 64, dtype)
    assert_close(prefill(kernels, q, [new], memory), prefilled(q, [new], memory))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_decode_of_a_row_has_the_same_bits_for_any_number_of_threads(
    kernels: CpuKernels, dtype: torch.dtype, head_dim: int
) -> None:
    memory = paged([1, 37, 512, 513, 1300, 64], 4, head_dim, 16, dtype)
    q = queries(6, 8, head_dim, dtype)
    together = decode(kernels, q, memory)
    assert torch.equal(decode(kernels, q.flip(0), memory.rows([5, 4, 3, 2, 1, 0])).flip(0), together)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 7):  # also shares heads out differently
            torch.set_num_threads(count)
            for row in range(6):
                assert torch.equal(decode(kernels, q[row : row + 1], memory.rows([row]))[0], together[row])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 50])
def test_prefill_has_the_same_bits_however_a_prompt_is_cut(
    kernels: CpuKernels, dtype: torch.dtype, window: int
) -> None:
    memory = paged([300], 2, 64, 16, dtype)
    q = queries(300, 6, 64, dtype)
    parts = []
    for begin, end in ((0, 1), (1, 130), (130, 256), (256, 300)):
        length = torch.tensor([end], dtype=torch.int32)
        part = Paged(memory.kv, memory.block_table, length, memory.keys, memory.values)
        parts.append(prefill(kernels, q[begin:end], [end - begin], part, window))
    assert torch.equal(torch.cat(parts), prefill(kernels, q, [300], memory, window))
