"""KV memory in int8: what is stored, bit for bit; attention over it, exact to what it holds and near to what it was
given."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from kernels import kv as form
from kernels import reference
from kernels.cpu.kernels import CpuKernels
from tests.kernels.oracle import DTYPES, attention, cos_sin, queries, rotated

BACKENDS = ("native", "reference")

TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
"""Queries and weights are rounded to 16 bits, or weights times their values' scales to the model's dtype."""

ROUNDING = 0.05
"""What rounding keys and values of N(0, 1) to int8 costs an output, at most; on average a fifth of it."""


def rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers and scales of rows x, one element at a time by the definition, in float32."""
    whole, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[:-1])
    for index in itertools.product(*map(range, x.shape[:-1])):
        row = x[index].float()
        scale = row.abs().max() / 127
        scales[index] = scale
        whole[index] = torch.tensor([round(float(e / scale)) if scale > 0 else 0 for e in row], dtype=torch.int8)
    return whole, scales


@dataclass
class Paged:
    """Sequences in shuffled blocks; all other memory is bytes 255, so scales there are NaN."""

    kv: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    given: list[tuple[torch.Tensor, torch.Tensor]]
    held: list[tuple[torch.Tensor, torch.Tensor]]


def paged(
    kernels: CpuKernels, lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> Paged:
    generator = torch.Generator().manual_seed(sum(lengths))
    counts = [-(-length // block_size) for length in lengths]
    kv = torch.full(form.layer_shape(sum(counts) + 3, kv_heads, block_size, head_dim, torch.int8), -1, dtype=torch.int8)
    kv[0] = 0
    tables = torch.full((len(lengths), max([*counts, 1]) + 2), 1 << 30, dtype=torch.int32)
    free = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
    given, held = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        tables[row, :count] = blocks.int()
        k, v = torch.randn((2, length, kv_heads, head_dim), generator=generator).to(dtype)
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
        kernels.store_kv(k, v, kv, slots)
        given.append((k, v))
        at = slots // block_size, slots % block_size
        stored = form.dequantized(kv).double().transpose(2, 3)
        held.append((stored[:, 0][at], stored[:, 1][at]))
    return Paged(kv, tables, torch.tensor(lengths, dtype=torch.int32), given, held)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 64), (16, 64), (4, 20), (256, 128)])
def test_a_row_is_whole_numbers_and_their_scale(
    kernels: CpuKernels, backend: str, dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    ops = kernels if backend == "native" else reference
    generator = torch.Generator().manual_seed(head_dim)
    k, v = torch.randn((2, 9, 2, head_dim), generator=generator).to(dtype)
    k[3], v[4, 1] = 0, 1e-30
    blocks = max(2, 40 // block_size)
    kv = torch.full(form.layer_shape(blocks, 2, block_size, head_dim, torch.int8), 7, dtype=torch.int8)
    slots = torch.randperm(blocks * block_size, generator=generator)[:9]
    slots[5] = -1
    ops.store_kv(k, v, kv, slots)
    expected = torch.full_like(kv, 7)
    for part, x in enumerate((k, v)):
        whole, scales = rows(x)
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                row = expected[slot // block_size, part, :, slot % block_size]
                row[:, :head_dim] = whole[t]
                row[:, head_dim:] = scales[t][:, None].view(torch.int8)
    assert torch.equal(kv, expected)
    assert torch.equal(form.quantized(k)[0, 0, :head_dim], rows(k)[0][0, 0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_store_rounds_what_it_has_rotated(kernels: CpuKernels, backend: str, dtype: torch.dtype) -> None:
    ops = kernels if backend == "native" else reference
    heads, kv_heads, head_dim, tokens = 6, 2, 64, 9
    qkv = torch.randn((tokens, heads + 2 * kv_heads, head_dim), generator=torch.Generator().manual_seed(1)).to(dtype)
    before, table, positions = qkv.clone(), cos_sin(40, head_dim), torch.arange(20, 20 + tokens)
    kv = torch.zeros(form.layer_shape(3, kv_heads, 16, head_dim, torch.int8), dtype=torch.int8)
    slots = torch.arange(16, 16 + tokens)
    slots[4] = -1
    ops.rope_store(qkv, kv, table, positions, slots)
    turned = rotated(before[:, heads : heads + kv_heads], table, positions)
    stored = form.dequantized(kv)[1].transpose(1, 2).double()
    for t in range(tokens):
        for part, x in enumerate((turned, before[:, heads + kv_heads :].double())):
            if t == 4:
                assert not stored[part, t].any()
                continue
            step = x[t].abs().amax(-1, keepdim=True) / 127
            error = (stored[part, t] - x[t]).abs() / step
            assert error.max() < 0.5 + {torch.float32: 0.001, torch.float16: 0.1, torch.bfloat16: 0.6}[dtype]


def assert_holds(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    error = (got.double() - expected).abs()
    assert error.max() < tolerance and error.mean() < tolerance / 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "head_dim", "group", "window", "softcap"),
    [
        (16, 64, 3, 0, 0.0),
        (16, 64, 3, 100, 20.0),
        (16, 80, 4, 0, 0.0),
        (1, 64, 1, 0, 0.0),
        (8, 128, 7, 0, 0.0),
        (256, 48, 2, 33, 0.0),
        (64, 256, 16, 0, 5.0),
    ],
)
def test_attention(
    kernels: CpuKernels,
    backend: str,
    dtype: torch.dtype,
    block_size: int,
    head_dim: int,
    group: int,
    window: int,
    softcap: float,
) -> None:
    """Against float64: near to what memory holds, and within ROUNDING of what was stored."""
    ops = kernels if backend == "native" else reference
    lengths, new = [1, 17, 130, 600], [1, 3, 130, 40]
    memory = paged(kernels, lengths, 2, head_dim, block_size, dtype)
    scale = head_dim**-0.5
    q = queries(len(lengths), 2 * group, head_dim, dtype)
    decoded = ops.paged_decode(q, memory.kv, memory.block_table, memory.seq_lens, scale, window, softcap)
    fresh = queries(sum(new), 2 * group, head_dim, dtype)
    bounds = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    filled = ops.paged_prefill(
        fresh, memory.kv, memory.block_table, bounds, memory.seq_lens, scale, window, softcap
    ).split(new)
    for row in range(len(lengths)):
        for got, asked in ((decoded[row : row + 1], q[row : row + 1]), (filled[row], fresh.split(new)[row])):
            assert_holds(got, attention(asked, *memory.held[row], window, softcap))
            error = (got.double() - attention(asked, *memory.given[row], window, softcap)).abs()
            assert error.max() < ROUNDING and error.mean() < ROUNDING / 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kernels: CpuKernels, dtype: torch.dtype) -> None:
    memory = paged(kernels, [1, 37, 512, 513, 1300], 4, 64, 16, dtype)
    q = queries(5, 8, 64, dtype)

    def run(of: list[int]) -> torch.Tensor:
        return kernels.paged_decode(q[of], memory.kv, memory.block_table[of], memory.seq_lens[of], 0.125, 0, 0.0)

    together = run([0, 1, 2, 3, 4])
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(run([row])[0], together[row]) for row in range(5))
    finally:
        torch.set_num_threads(threads)


def test_blocks_are_copied_with_their_scales(kernels: CpuKernels) -> None:
    memory = paged(kernels, [32], 2, 64, 16, torch.bfloat16).kv
    before = memory.clone()
    kernels.copy_blocks([memory], torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(memory, before[[0, 1, 1, 3, 4]])
