"""Attention over paged KV: the same cases on every implementation, against float64.

All memory but live tokens is NaN, and block tables end in numbers far outside (``oracle.paged``).
"""

from __future__ import annotations

from itertools import accumulate, product

import pytest
import torch

from kernels.errors import UnavailableError
from kernels.ops import Kernels, select
from tests.kernels.oracle import (
    DTYPES,
    TOLERANCE,
    Paged,
    assert_close,
    decoded,
    paged,
    prefilled,
    queries,
)

Case = tuple[int, int, int, torch.dtype]

HEAD_DIMS = (64, 80, 96, 128, 256)
SMALL_BLOCKS, BLOCKS, LARGE_BLOCKS = (1, 2, 4, 8), (16, 32, 64, 128), (256,)

# Query heads to a KV head, head_dim, block_size, dtype: every group size, each head size and each block size with each
# dtype. Implementations that do not take a block size skip its cases.
CASES: list[Case] = [
    *((1 + i, dim, BLOCKS[i % 4], dtype) for i, (dim, dtype) in enumerate(product(HEAD_DIMS, DTYPES))),
    (16, 64, 16, torch.bfloat16),
    *((3, 64, block_size, dtype) for block_size, dtype in product((*SMALL_BLOCKS, *LARGE_BLOCKS), DTYPES)),
]
SHAPES = pytest.mark.parametrize(("group", "head_dim", "block_size", "dtype"), CASES)
SCORES = pytest.mark.parametrize(
    ("window", "softcap", "dtype"),
    [(*scores, dtype) for scores, dtype in product([(0, 5.0), (1, 0.0), (40, 0.0), (300, 5.0)], DTYPES)],
)


def memory_for(
    ops: Kernels, lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> Paged:
    try:
        ops.check_kv(block_size, head_dim)
    except UnavailableError as error:
        pytest.skip(str(error))
    return paged(lengths, kv_heads, head_dim, block_size, dtype)


def decode(
    ops: Kernels, device: torch.device, q: torch.Tensor, memory: Paged, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    tensors = (x.to(device) for x in (q, memory.kv, memory.block_table, memory.seq_lens))
    return ops.paged_decode(*tensors, scale=q.shape[2] ** -0.5, window=window, softcap=softcap).cpu()


def prefill(
    ops: Kernels,
    device: torch.device,
    q: torch.Tensor,
    new: list[int],
    memory: Paged,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    bounds = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    tensors = (x.to(device) for x in (q, memory.kv, memory.block_table, bounds, memory.seq_lens))
    return ops.paged_prefill(*tensors, scale=q.shape[2] ** -0.5, window=window, softcap=softcap).cpu()


@SHAPES
def test_decode(
    ops: Kernels, device: torch.device, group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    lengths = [0, 1, 15, 16, 17, 130, 542]  # an empty one, as CUDA graphs are padded with; one that is cut
    kv_heads = 2 if group < 4 else 1
    memory = memory_for(ops, lengths, kv_heads, head_dim, block_size, dtype)
    q = queries(len(lengths), kv_heads * group, head_dim, dtype)
    got = decode(ops, device, q, memory)
    assert not got[0].any()
    assert_close(got, decoded(q, memory))


@SHAPES
def test_prefill(
    ops: Kernels, device: torch.device, group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    lengths, new = [0, 1, 16, 140, 66, 70], [0, 1, 16, 7, 1, 70]
    memory = memory_for(ops, lengths, 1, head_dim, block_size, dtype)
    q = queries(sum(new), group, head_dim, dtype)
    assert_close(prefill(ops, device, q, new, memory), prefilled(q, new, memory))


@SCORES
def test_decode_reads_nothing_before_a_window(
    ops: Kernels, device: torch.device, window: int, softcap: float, dtype: torch.dtype
) -> None:
    lengths = [1, 40, 41, 130, 542]
    memory = paged(lengths, 1, 64, 16, dtype, hidden=[max(0, n - window) if window else 0 for n in lengths])
    q = queries(len(lengths), 3, 64, dtype)
    assert_close(decode(ops, device, q, memory, window, softcap), decoded(q, memory, window, softcap))


@SCORES
def test_prefill_reads_nothing_before_a_window(
    ops: Kernels, device: torch.device, window: int, softcap: float, dtype: torch.dtype
) -> None:
    lengths, new = [5, 400, 70], [5, 3, 70]
    first = [max(0, n - m + 1 - window) if window else 0 for n, m in zip(lengths, new, strict=True)]
    memory = paged(lengths, 1, 64, 16, dtype, hidden=first)
    q = queries(sum(new), 3, 64, dtype)
    assert_close(prefill(ops, device, q, new, memory, window, softcap), prefilled(q, new, memory, window, softcap))


def test_blocks_before_a_window_need_not_exist(ops: Kernels, device: torch.device) -> None:
    memory = paged([300], 1, 64, 16, torch.float32)
    memory.block_table[0, : (300 - 7 - 100) // 16] = 1 << 30
    q = queries(8, 2, 64, torch.float32)
    assert_close(decode(ops, device, q[:1], memory, 100), decoded(q[:1], memory, 100))
    assert_close(prefill(ops, device, q, [8], memory, 100), prefilled(q, [8], memory, 100))


def test_scores_far_apart_neither_overflow_nor_vanish(ops: Kernels, device: torch.device) -> None:
    memory = paged([1, 200, 600], 1, 64, 16, torch.float32)
    q = 300 * queries(3, 2, 64, torch.float32)
    # Of scores in the thousands float32 leaves about 1e-4.
    for got in (decode(ops, device, q, memory), prefill(ops, device, q, [1, 1, 1], memory)):
        torch.testing.assert_close(got.double(), decoded(q, memory), atol=5e-3, rtol=0)


def assert_same(ops: Kernels, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit for bit; but the reference pads rows to the longest of a group, and torch sums in other orders then."""
    tolerance = TOLERANCE[got.dtype] if ops.name == "reference" else 0
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_a_row_has_the_same_bits_alone_and_in_a_batch(
    ops: Kernels, device: torch.device, dtype: torch.dtype
) -> None:
    lengths = [700, 3, 1281, 0, 257]  # cut at other places than others, and into more pieces
    memory = paged(lengths, 1, 64, 16, dtype)
    q = queries(len(lengths), 3, 64, dtype)
    together = decode(ops, device, q, memory)
    assert_close(together, decoded(q, memory))
    for row in range(len(lengths)):
        assert_same(ops, decode(ops, device, q[row : row + 1], memory.rows([row])), together[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_a_chunk_has_the_same_bits_alone_and_in_a_batch(
    ops: Kernels, device: torch.device, dtype: torch.dtype
) -> None:
    lengths, new = [200, 1, 50, 80, 64], [70, 1, 20, 21, 64]  # few rows and many, which get other tiles on some devices
    memory = paged(lengths, 1, 64, 16, dtype)
    q = queries(sum(new), 3, 64, dtype)
    together = prefill(ops, device, q, new, memory).split(new)
    for row, part in enumerate(q.split(new)):
        assert_same(ops, prefill(ops, device, part, [new[row]], memory.rows([row])), together[row])


def test_prefill_in_chunks_is_the_prefill_of_the_whole(ops: Kernels, device: torch.device) -> None:
    memory = paged([90], 1, 64, 16, torch.float32)
    q = queries(90, 3, 64, torch.float32)
    ends = [40, 41, 71, 90]
    parts = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        length = torch.tensor([end], dtype=torch.int32)
        part = Paged(memory.kv, memory.block_table, length, memory.keys, memory.values)
        parts.append(prefill(ops, device, q[begin:end], [end - begin], part))
    whole = prefill(ops, device, q, [90], memory)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=TOLERANCE[torch.float32])


def test_decode_is_the_prefill_of_one_token(ops: Kernels, device: torch.device) -> None:
    memory = paged([1, 33, 768], 1, 64, 16, torch.float32)
    q = queries(3, 4, 64, torch.float32)
    one, other = decode(ops, device, q, memory), prefill(ops, device, q, [1, 1, 1], memory)
    torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE[torch.float32])


def test_slices_of_fused_queries_and_of_longer_tables(ops: Kernels, device: torch.device) -> None:
    """Queries as they lie in a fused projection, and tables and lengths at odd addresses of larger tensors."""
    memory = paged([9, 40, 17], 2, 64, 16, torch.float32)
    q = queries(5, 10, 64, torch.float32).to(device)[2:, 1:7]
    table = torch.cat([memory.block_table[:1], memory.block_table]).to(device)[1:]
    lens = torch.cat([memory.seq_lens[:1], memory.seq_lens]).to(device)[1:]
    assert_close(ops.paged_decode(q, memory.kv.to(device), table, lens, scale=0.125).cpu(), decoded(q.cpu(), memory))


def test_no_rows(ops: Kernels, device: torch.device) -> None:
    memory = paged([5], 1, 64, 16, torch.float32)
    q = queries(0, 2, 64, torch.float32)
    assert decode(ops, device, q, memory.rows([])).shape == (0, 2, 64)
    assert prefill(ops, device, q, [0], memory).shape == (0, 2, 64)
    assert prefill(ops, device, q, [], memory.rows([])).shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(2, 1, dtype=torch.int64)}, "block_table is torch.int64"),
        ({"seq_lens": torch.ones(2)}, "seq_lens is torch.float32"),
        ({"q": torch.zeros(2, 5, 64)}, "heads must be a multiple of the 2 of kv"),
        ({"q": torch.zeros(3, 4, 64)}, r"q has shape \(3, 4, 64\), not \(2, 4, 64\)"),
        ({"kv": torch.zeros(4, 2, 2, 64)}, "kv has shape"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "q": torch.zeros(2, 4, 64),
        "kv": torch.zeros(4, 2, 2, 16, 64),
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        select(torch.device("cpu"), "reference").paged_decode(**arguments | change, scale=1.0)
