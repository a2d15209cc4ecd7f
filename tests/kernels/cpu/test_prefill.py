from __future__ import annotations

import itertools

import pytest
import torch

from kernels.cpu.kernels import CpuKernels
from tests.kernels.cpu.oracle import Paged, assert_close, attention, paged, queries

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def prefill(
    kernels: CpuKernels, q: torch.Tensor, new: list[int], memory: Paged, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    bounds = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    scale = q.shape[2] ** -0.5
    return kernels.paged_prefill(q, memory.kv, memory.block_table, bounds, memory.seq_lens, scale, window, softcap)


def expected(q: torch.Tensor, new: list[int], memory: Paged, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    rows = zip(q.split(new), memory.keys, memory.values, strict=True)
    return torch.cat([attention(part, k, v, window, softcap) for part, k, v in rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_head_sizes_and_groups(kernels: CpuKernels, dtype: torch.dtype, head_dim: int, group: int) -> None:
    memory = paged([1, 20, 150], 2, head_dim, 16, dtype)
    q = queries(1 + 20 + 150, 2 * group, head_dim, dtype)
    assert_close(prefill(kernels, q, [1, 20, 150], memory), expected(q, [1, 20, 150], memory), dtype)


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size(kernels: CpuKernels, group: int) -> None:
    memory = paged([140], 1, 64, 16, torch.bfloat16)
    q = queries(140, group, 64, torch.bfloat16)
    assert_close(prefill(kernels, q, [140], memory), expected(q, [140], memory), torch.bfloat16)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_block_size(kernels: CpuKernels, dtype: torch.dtype, block_size: int) -> None:
    memory = paged([129, 257], 3, 64, block_size, dtype)
    q = queries(129 + 60, 9, 64, dtype)
    assert_close(prefill(kernels, q, [129, 60], memory), expected(q, [129, 60], memory), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached", [0, 1, 127, 128, 300])
@pytest.mark.parametrize("new", [1, 2, 7, 33, 130])
def test_chunks_after_cached_tokens(kernels: CpuKernels, dtype: torch.dtype, cached: int, new: int) -> None:
    memory = paged([cached + new], 2, 64, 16, dtype)
    q = queries(new, 6, 64, dtype)
    assert_close(prefill(kernels, q, [new], memory), expected(q, [new], memory), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 7, 128, 200])
def test_a_window_reads_nothing_before_it(kernels: CpuKernels, dtype: torch.dtype, window: int) -> None:
    lengths, new = [90, 420], [90, 130]
    first = [max(0, n - m + 1 - window) for n, m in zip(lengths, new, strict=True)]
    memory = paged(lengths, 2, 64, 16, dtype, hidden=first)
    q = queries(220, 4, 64, dtype)
    assert_close(prefill(kernels, q, new, memory, window=window), expected(q, new, memory, window=window), dtype)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(kernels: CpuKernels, dtype: torch.dtype, softcap: float) -> None:
    memory = paged([200], 2, 96, 16, dtype)
    q = 3 * queries(140, 4, 96, dtype)
    assert_close(
        prefill(kernels, q, [140], memory, softcap=softcap), expected(q, [140], memory, softcap=softcap), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 50])
def test_rows_have_the_same_bits_alone_in_a_batch_and_in_chunks(
    kernels: CpuKernels, dtype: torch.dtype, window: int
) -> None:
    memory = paged([300, 41], 2, 64, 16, dtype)
    q = queries(341, 6, 64, dtype)
    together = prefill(kernels, q, [300, 41], memory, window)

    def chunk(begin: int, end: int) -> torch.Tensor:
        bounds = torch.tensor([0, end - begin], dtype=torch.int32)
        length = torch.tensor([end], dtype=torch.int32)
        return kernels.paged_prefill(
            q[begin:end], memory.kv, memory.block_table[:1], bounds, length, 64**-0.5, window, 0.0
        )

    assert torch.equal(chunk(0, 300), together[:300])
    pieces = [chunk(0, 1), chunk(1, 130), chunk(130, 256), chunk(256, 300)]
    assert torch.equal(torch.cat(pieces), together[:300])


def test_sequences_without_new_tokens(kernels: CpuKernels) -> None:
    memory = paged([10, 30, 20], 2, 64, 16, torch.float32)
    q = queries(15, 4, 64, torch.float32)
    assert_close(prefill(kernels, q, [10, 0, 5], memory), expected(q, [10, 0, 5], memory), torch.float32)


def test_no_tokens(kernels: CpuKernels) -> None:
    memory = paged([], 2, 64, 16, torch.float32)
    assert prefill(kernels, queries(0, 4, 64, torch.float32), [], memory).shape == (0, 4, 64)
