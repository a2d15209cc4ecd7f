from __future__ import annotations

import pytest
import torch

from kernels.cpu.kernels import CpuKernels
from tests.kernels.cpu.oracle import Paged, assert_close, attention, paged, queries

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decode(kernels: CpuKernels, q: torch.Tensor, memory: Paged, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    scale = q.shape[2] ** -0.5
    return kernels.paged_decode(q, memory.kv, memory.block_table, memory.seq_lens, scale, window, softcap)


def expected(q: torch.Tensor, memory: Paged, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    rows = [
        attention(q[i : i + 1], k, v, window, softcap)
        for i, (k, v) in enumerate(zip(memory.keys, memory.values, strict=True))
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_head_sizes_and_groups(kernels: CpuKernels, dtype: torch.dtype, head_dim: int, group: int) -> None:
    memory = paged([1, 15, 16, 17, 130], 2, head_dim, 16, dtype)
    q = queries(5, 2 * group, head_dim, dtype)
    assert_close(decode(kernels, q, memory), expected(q, memory), dtype)


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size(kernels: CpuKernels, group: int) -> None:
    memory = paged([77], 1, 64, 16, torch.bfloat16)
    q = queries(1, group, 64, torch.bfloat16)
    assert_close(decode(kernels, q, memory), expected(q, memory), torch.bfloat16)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_block_size(kernels: CpuKernels, dtype: torch.dtype, block_size: int) -> None:
    memory = paged([1, 63, 64, 65, 300], 3, 64, block_size, dtype)
    q = queries(5, 9, 64, dtype)
    assert_close(decode(kernels, q, memory), expected(q, memory), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_several_chunks(kernels: CpuKernels, dtype: torch.dtype) -> None:
    memory = paged([511, 512, 513, 1024, 1500, 2], 2, 64, 16, dtype)
    q = queries(6, 6, 64, dtype)
    assert_close(decode(kernels, q, memory), expected(q, memory), dtype)


@pytest.mark.parametrize("window", [1, 5, 16, 64, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_reads_nothing_before_it(kernels: CpuKernels, dtype: torch.dtype, window: int) -> None:
    lengths = [3, 40, 64, 700, 1100]
    memory = paged(lengths, 2, 64, 16, dtype, hidden=[max(0, n - window) for n in lengths])
    q = queries(5, 4, 64, dtype)
    assert_close(decode(kernels, q, memory, window=window), expected(q, memory, window=window), dtype)


def test_blocks_before_a_window_need_not_exist(kernels: CpuKernels) -> None:
    memory = paged([700], 2, 64, 16, torch.float32)
    memory.block_table[0, : (700 - 100) // 16] = 1 << 30
    q = queries(1, 4, 64, torch.float32)
    assert_close(decode(kernels, q, memory, window=100), expected(q, memory, window=100), torch.float32)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(kernels: CpuKernels, dtype: torch.dtype, softcap: float) -> None:
    memory = paged([5, 100, 600], 2, 80, 16, dtype)
    q = 3 * queries(3, 4, 80, dtype)
    assert_close(decode(kernels, q, memory, softcap=softcap), expected(q, memory, softcap=softcap), dtype)


def test_scores_far_apart_neither_overflow_nor_vanish(kernels: CpuKernels) -> None:
    memory = paged([1, 200, 900], 2, 64, 16, torch.float32)
    q = 300 * queries(3, 4, 64, torch.float32)
    # With scores in the thousands float32 leaves about 1e-4 of them, so compare what dominates.
    torch.testing.assert_close(decode(kernels, q, memory).double(), expected(q, memory), atol=5e-3, rtol=0)


def test_an_empty_sequence_gives_zeros(kernels: CpuKernels) -> None:
    memory = paged([0, 20, 0], 2, 64, 16, torch.bfloat16)
    out = decode(kernels, queries(3, 6, 64, torch.bfloat16), memory)
    assert not out[0].any() and not out[2].any() and out[1].any()


def test_no_sequences(kernels: CpuKernels) -> None:
    memory = paged([], 2, 64, 16, torch.bfloat16)
    assert decode(kernels, queries(0, 6, 64, torch.bfloat16), memory).shape == (0, 6, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kernels: CpuKernels, dtype: torch.dtype, head_dim: int) -> None:
    memory = paged([1, 37, 512, 513, 1300, 64], 4, head_dim, 16, dtype)
    q = queries(6, 8, head_dim, dtype)
    scale = head_dim**-0.5

    def run(rows: list[int]) -> torch.Tensor:
        return kernels.paged_decode(q[rows], memory.kv, memory.block_table[rows], memory.seq_lens[rows], scale, 0, 0.0)

    together = run([0, 1, 2, 3, 4, 5])
    assert torch.equal(run([5, 4, 3, 2, 1, 0]).flip(0), together)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 7):  # also shares heads out differently
            torch.set_num_threads(count)
            for row in range(6):
                assert torch.equal(run([row])[0], together[row])
    finally:
        torch.set_num_threads(threads)


def test_queries_may_be_a_part_of_fused_rows(kernels: CpuKernels) -> None:
    memory = paged([30, 5], 2, 64, 16, torch.bfloat16)
    fused = torch.randn(2, 4 + 2 + 2, 64).to(torch.bfloat16)
    q = fused[:, :4]
    assert_close(decode(kernels, q, memory), expected(q, memory), torch.bfloat16)
