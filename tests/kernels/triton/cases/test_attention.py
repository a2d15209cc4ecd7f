"""Attention over paged KV against a float64 oracle; all memory but live tokens is NaN, block tables end in poison."""

from __future__ import annotations

import pytest
import torch

import kernels.triton as kernels
from kernels.errors import UnavailableError
from kernels.triton.attention import FEW_ROWS, MAX_SPLITS, MIN_SPLIT_TOKENS
from tests.kernels.cpu.oracle import TOLERANCE, Paged, assert_close, attention, paged, queries

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# KV heads, query heads of each, head_dim, block_size
SHAPES = [
    (2, 1, 64, 16),
    (2, 2, 8, 16),
    (1, 3, 64, 32),
    (1, 4, 80, 16),
    (1, 7, 128, 128),
    (1, 8, 96, 64),
    (1, 16, 256, 16),
]
LENGTHS = [0, 1, 15, 16, 17, 130, 2 * MIN_SPLIT_TOKENS + 30]


def decode(
    q: torch.Tensor,
    memory: Paged,
    device: torch.device,
    window: int = 0,
    softcap: float = 0.0,
    rows: slice = slice(None),
) -> torch.Tensor:
    out = kernels.paged_decode(
        q[rows].to(device),
        memory.kv.to(device),
        memory.block_table[rows].to(device),
        memory.seq_lens[rows].to(device),
        q.shape[2] ** -0.5,
        window,
        softcap,
    )
    return out.cpu()


def prefill(
    q: torch.Tensor, new: list[int], memory: Paged, device: torch.device, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    out = kernels.paged_prefill(
        q.to(device),
        memory.kv.to(device),
        memory.block_table.to(device),
        torch.tensor([0, *new]).cumsum(0).int().to(device),
        memory.seq_lens.to(device),
        q.shape[2] ** -0.5,
        window,
        softcap,
    )
    return out.cpu()


def prefill_oracle(
    q: torch.Tensor, new: list[int], memory: Paged, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    parts = [
        attention(part, memory.keys[row], memory.values[row], window, softcap)
        for row, part in enumerate(q.split(new))
        if len(part)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), SHAPES)
def test_decode(
    kv_heads: int, group: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    memory = paged(LENGTHS, kv_heads, head_dim, block_size, dtype)
    q = queries(len(LENGTHS), kv_heads * group, head_dim, dtype)
    got = decode(q, memory, device)
    assert (got[0] == 0).all()  # an empty row, as CUDA graphs are padded with
    for row in range(1, len(LENGTHS)):
        assert_close(got[row : row + 1], attention(q[row : row + 1], memory.keys[row], memory.values[row]), dtype)


@pytest.mark.parametrize(("window", "softcap"), [(0, 5.0), (1, 0.0), (40, 0.0), (300, 5.0), (1000, 0.0)])
def test_decode_window_and_softcap(window: int, softcap: float, device: torch.device) -> None:
    lengths = [1, 40, 41, 130, 2 * MIN_SPLIT_TOKENS + 30]
    hidden = [max(0, length - window) if window else 0 for length in lengths]
    memory = paged(lengths, 1, 64, 16, torch.float32, hidden)
    q = queries(len(lengths), 2, 64, torch.float32)
    got = decode(q, memory, device, window, softcap)
    for row in range(len(lengths)):
        wanted = attention(q[row : row + 1], memory.keys[row], memory.values[row], window, softcap)
        assert_close(got[row : row + 1], wanted, torch.float32)


def test_decode_of_a_row_is_the_same_alone_and_in_a_batch(device: torch.device) -> None:
    """More pieces than programs in the batch, one program a piece alone."""
    lengths = [700, 3, 5 * MIN_SPLIT_TOKENS + 1, MIN_SPLIT_TOKENS, 0, MIN_SPLIT_TOKENS + 1]
    memory = paged(lengths, 2, 64, 16, torch.bfloat16)
    q = queries(len(lengths), 6, 64, torch.bfloat16)
    together = decode(q, memory, device)
    for row in range(len(lengths)):
        alone = decode(q, memory, device, rows=slice(row, row + 1))
        assert torch.equal(together[row : row + 1], alone)


def test_decode_of_more_pieces_than_there_are_places(device: torch.device) -> None:
    """Pieces grow with a sequence that is longer than MAX_SPLITS of the shortest."""
    lengths = [MAX_SPLITS * MIN_SPLIT_TOKENS, MAX_SPLITS * MIN_SPLIT_TOKENS + 1]
    memory = paged(lengths, 1, 16, 128, torch.float32)
    q = queries(2, 1, 16, torch.float32)
    got = decode(q, memory, device)
    for row in range(2):
        wanted = attention(q[row : row + 1], memory.keys[row], memory.values[row])
        assert_close(got[row : row + 1], wanted, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), SHAPES)
def test_prefill(
    kv_heads: int, group: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    lengths, new = [0, 1, 16, 90, 66, 70], [0, 1, 16, 7, 1, 70]
    memory = paged(lengths, kv_heads, head_dim, block_size, dtype)
    q = queries(sum(new), kv_heads * group, head_dim, dtype)
    assert_close(prefill(q, new, memory, device), prefill_oracle(q, new, memory), dtype)


@pytest.mark.parametrize(("window", "softcap"), [(0, 5.0), (1, 0.0), (16, 0.0), (40, 5.0), (1000, 0.0)])
def test_prefill_window_and_softcap(window: int, softcap: float, device: torch.device) -> None:
    lengths, new = [5, 130, 70], [5, 3, 70]
    hidden = [max(0, n - count + 1 - window) if window else 0 for n, count in zip(lengths, new, strict=True)]
    memory = paged(lengths, 1, 64, 16, torch.float32, hidden)
    q = queries(sum(new), 3, 64, torch.float32)
    got = prefill(q, new, memory, device, window, softcap)
    assert_close(got, prefill_oracle(q, new, memory, window, softcap), torch.float32)


def test_prefill_of_a_chunk_is_the_same_alone_and_in_a_batch(device: torch.device) -> None:
    """Short chunks take the tile for few rows, and long ones the other, whatever else is there."""
    lengths, new = [100, 1, 50, 80, FEW_ROWS], [70, 1, 20, 21, FEW_ROWS]
    memory = paged(lengths, 1, 64, 16, torch.bfloat16)
    q = queries(sum(new), 3, 64, torch.bfloat16)
    together = prefill(q, new, memory, device).split(new)
    for row, chunk in enumerate(q.split(new)):
        one = slice(row, row + 1)
        alone = Paged(memory.kv, memory.block_table[one], memory.seq_lens[one], memory.keys[one], memory.values[one])
        assert torch.equal(together[row], prefill(chunk, [new[row]], alone, device))


def test_prefill_in_chunks_is_the_prefill_of_the_whole(device: torch.device) -> None:
    memory = paged([90], 1, 64, 16, torch.float32)
    q = queries(90, 3, 64, torch.float32)
    whole = prefill(q, [90], memory, device)
    begin, parts = 0, []
    for count in (40, 1, 30, 19):
        end = begin + count
        part = Paged(memory.kv, memory.block_table, torch.tensor([end], dtype=torch.int32), memory.keys, memory.values)
        parts.append(prefill(q[begin:end], [count], part, device))
        begin = end
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=TOLERANCE[torch.float32])


def test_decode_is_the_prefill_of_one_token(device: torch.device) -> None:
    lengths = [1, 33, 3 * MIN_SPLIT_TOKENS]
    memory = paged(lengths, 1, 64, 16, torch.float32)
    q = queries(3, 4, 64, torch.float32)
    split, unsplit = decode(q, memory, device), prefill(q, [1, 1, 1], memory, device)
    torch.testing.assert_close(split, unsplit, rtol=0, atol=TOLERANCE[torch.float32])


def test_slices_of_fused_queries_and_of_longer_tables(device: torch.device) -> None:
    """Queries as they lie in a fused projection, and tables and lengths at odd addresses of larger tensors."""
    memory = paged([9, 40, 17], 2, 64, 16, torch.float32)
    fused = queries(5, 10, 64, torch.float32).to(device)
    q = fused[2:, 1:7]
    table = torch.cat([memory.block_table[:1], memory.block_table]).to(device)[1:]
    lens = torch.cat([memory.seq_lens[:1], memory.seq_lens]).to(device)[1:]
    got = kernels.paged_decode(q, memory.kv.to(device), table, lens, 0.125, 0, 0.0).cpu()
    for row in range(3):
        wanted = attention(q[row : row + 1].cpu(), memory.keys[row], memory.values[row])
        assert_close(got[row : row + 1], wanted, torch.float32)


def test_no_rows(device: torch.device) -> None:
    memory = paged([5], 1, 64, 16, torch.float32)
    assert decode(queries(0, 2, 64, torch.float32), memory, device, rows=slice(0, 0)).shape == (0, 2, 64)
    assert prefill(queries(0, 2, 64, torch.float32), [0], memory, device).shape == (0, 2, 64)


def test_shapes_that_the_kernels_do_not_take_are_named() -> None:
    kernels.check_kv(128, 256)
    with pytest.raises(UnavailableError, match="block size 8: these kernels take 16, 32, 64 or 128"):
        kernels.check_kv(8, 64)
    with pytest.raises(UnavailableError, match="heads of 288 elements: these kernels take up to 256"):
        kernels.check_kv(16, 288)
