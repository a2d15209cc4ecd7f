"""Paged attention against a float64 oracle, with everything outside the live tokens poisoned."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import select

ops = select(torch.device("cpu"), "reference")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LENGTHS = [1, 15, 16, 17, 33, 130]


class Paged:
    """Random sequences in shuffled blocks of KV memory; every slot that holds no token is NaN, save block 0."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
        counts = [-(-length // block_size) for length in lengths]
        width = max(counts) + 2
        num_blocks = sum(counts) + 3
        order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        self.kv = torch.full((num_blocks, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        self.kv[0] = 0
        self.table = torch.zeros(len(lengths), width, dtype=torch.int32)
        self.keys, self.values = [], []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
            self.table[row, :count] = blocks.int()
            # allocated beyond the length, and so full of what was there before
            self.table[row, count:] = int(order[0]) if order else 0
            k = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
            v = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
            slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
            ops.store_kv(k, v, self.kv, slots)
            self.keys.append(k)
            self.values.append(v)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """Attention of the last len(q) tokens, one at a time, in float64, written from the formula."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        end = len(k) - len(q) + i + 1
        begin = max(0, end - window) if window else 0
        for head in range(q.shape[1]):
            scores = k[begin:end, head // group].double() @ q[i, head].double() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.max())
            out[i, head] = (weights / weights.sum()) @ v[begin:end, head // group].double()
    return out


def check(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.double() - wanted).abs()
    assert torch.isfinite(got).all()
    assert error.max() < TOLERANCE[got.dtype]
    assert error.mean() < TOLERANCE[got.dtype] / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(2, 1, 64, 16), (3, 3, 64, 16), (2, 4, 80, 16), (1, 7, 128, 32), (1, 8, 96, 32), (2, 4, 128, 16)],
)
def test_decode(kv_heads: int, group: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    paged = Paged(LENGTHS, kv_heads, head_dim, block_size, dtype)
    q = torch.randn(len(LENGTHS), kv_heads * group, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = ops.paged_decode(q, paged.kv, paged.table, paged.lengths, scale=head_dim**-0.5)
    for row in range(len(LENGTHS)):
        check(got[row : row + 1], attend(q[row : row + 1], paged.keys[row], paged.values[row], head_dim**-0.5))


@pytest.mark.parametrize(("window", "softcap"), [(0, 5.0), (1, 0.0), (16, 0.0), (20, 5.0), (1000, 0.0)])
def test_decode_window_and_softcap(window: int, softcap: float) -> None:
    paged = Paged(LENGTHS, 2, 64, 16, torch.float32)
    q = torch.randn(len(LENGTHS), 6, 64, generator=torch.Generator().manual_seed(2))
    got = ops.paged_decode(q, paged.kv, paged.table, paged.lengths, scale=0.5, window=window, softcap=softcap)
    for row in range(len(LENGTHS)):
        wanted = attend(q[row : row + 1], paged.keys[row], paged.values[row], 0.5, window, softcap)
        check(got[row : row + 1], wanted)


def test_decode_of_many_lengths_equals_each_alone() -> None:
    lengths = [511, 3, 700, 64, 1, 200, 512, 90, 300, 1024]
    paged = Paged(lengths, 3, 64, 16, torch.float32)
    q = torch.randn(len(lengths), 9, 64, generator=torch.Generator().manual_seed(3))
    together = ops.paged_decode(q, paged.kv, paged.table, paged.lengths, scale=0.125)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = ops.paged_decode(q[one], paged.kv, paged.table[one], paged.lengths[one], scale=0.125)
        torch.testing.assert_close(together[one], alone, rtol=0, atol=1e-6)
        check(together[one], attend(q[one], paged.keys[row], paged.values[row], 0.125))


def test_decode_of_an_empty_row_is_zero() -> None:
    paged = Paged([5, 20], 2, 64, 16, torch.float32)
    q = torch.randn(3, 4, 64)
    table = torch.cat([paged.table, torch.zeros_like(paged.table[:1])])
    lengths = torch.tensor([5, 20, 0], dtype=torch.int32)
    got = ops.paged_decode(q, paged.kv, table, lengths, scale=1.0)
    assert (got[2] == 0).all()
    check(got[:1], attend(q[:1], paged.keys[0], paged.values[0], 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(2, 1, 64, 16), (3, 3, 64, 16), (2, 4, 80, 16), (1, 7, 128, 32), (1, 8, 96, 32)],
)
def test_prefill(kv_heads: int, group: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    lengths, new = [1, 16, 40, 66, 70], [1, 16, 7, 1, 70]
    check_prefill(lengths, new, kv_heads, group, head_dim, block_size, dtype)


@pytest.mark.parametrize(("window", "softcap"), [(0, 5.0), (1, 0.0), (16, 0.0), (20, 5.0), (1000, 0.0)])
def test_prefill_window_and_softcap(window: int, softcap: float) -> None:
    check_prefill([5, 40, 70], [5, 3, 70], 2, 3, 64, 16, torch.float32, window, softcap)


def check_prefill(
    lengths: list[int],
    new: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    paged = Paged(lengths, kv_heads, head_dim, block_size, dtype)
    q = torch.randn(sum(new), kv_heads * group, head_dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    bounds = torch.tensor([0, *new]).cumsum(0).int()
    scale = head_dim**-0.5
    got = ops.paged_prefill(
        q, paged.kv, paged.table, bounds, paged.lengths, scale=scale, window=window, softcap=softcap
    )
    for row, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        wanted = attend(q[begin:end], paged.keys[row], paged.values[row], scale, window, softcap)
        check(got[begin:end], wanted)


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
        ops.paged_decode(**arguments | change, scale=1.0)
