"""Every kernel against float64 or the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from benchmarks.gpu.shapes import Memory, Shape, oracle
from kernels import ops, reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def close(self, what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        limit = TOLERANCE[got.dtype]
        error = (got.double() - wanted).abs()
        worst, mean = float(error.nan_to_num(math.inf).max()), float(error.mean())
        self.that(f"{what}: largest error {worst:.1e} (limit {limit:.0e})", worst < limit and mean < limit / 4)

    def that(self, what: str, right: bool) -> None:
        self.failed += not right
        print(f"  {'ok  ' if right else 'FAIL'} {what}", flush=True)


def check_attention(
    shape: Shape, dtype: torch.dtype, device: torch.device, lengths: list[int], chunks: Sequence[int], checks: Checks
) -> None:
    """chunks: new tokens of each sequence when it is prefilled, over and over."""
    kernels = ops.select(device, "triton")
    name = f"{shape.name} {str(dtype)[6:]}"
    memory = Memory(shape, lengths, dtype, device)
    q = torch.randn(len(lengths), shape.heads, shape.head_dim, dtype=dtype, device=device)
    got = kernels.paged_decode(q, memory.kv, memory.table, memory.lens, scale=shape.scale)
    wanted = torch.zeros(q.shape, dtype=torch.float64, device=device)
    for row, length in enumerate(lengths):
        if length:
            wanted[row] = oracle(q[row : row + 1], memory, row, shape.scale)[0]
    checks.close(f"{name} decode", got, wanted)
    alone = [
        kernels.paged_decode(
            q[row : row + 1], memory.kv, memory.table[row : row + 1], memory.lens[row : row + 1], scale=shape.scale
        )
        for row in range(len(lengths))
    ]
    checks.that(f"{name} decode: same bits alone and in the batch", torch.equal(torch.cat(alone), got))

    new = [min(length, chunks[i % len(chunks)]) for i, length in enumerate(lengths)]
    bounds = torch.tensor([0, *new], device=device).cumsum(0).int()
    q = torch.randn(sum(new), shape.heads, shape.head_dim, dtype=dtype, device=device)
    got = kernels.paged_prefill(q, memory.kv, memory.table, bounds, memory.lens, scale=shape.scale)
    parts = [oracle(part, memory, row, shape.scale) for row, part in enumerate(q.split(new)) if len(part)]
    checks.close(f"{name} prefill", got, torch.cat(parts))


def check_rest(device: torch.device, vocab: int, rows: int, checks: Checks) -> None:
    kernels = ops.select(device, "triton")
    dtype = torch.bfloat16
    x, weight = torch.randn(7, 2560, device=device).to(dtype), torch.randn(2560, device=device).to(dtype)
    residual = torch.randn(7, 2560, device=device).to(dtype)
    other = residual.clone()
    for name, got, wanted in (
        ("rms_norm", kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)),
        (
            "add_rms_norm",
            kernels.add_rms_norm(x, residual, weight, 1e-6),
            reference.add_rms_norm(x, other, weight, 1e-6),
        ),
        ("the sum of add_rms_norm", residual, other),
        ("silu_mul", kernels.silu_mul(x), reference.silu_mul(x)),
    ):
        checks.that(f"{name} as the reference", torch.allclose(got.float(), wanted.float(), rtol=2**-6, atol=1e-2))

    qkv, kv = torch.randn(5, 15, 64, device=device).to(dtype), torch.zeros(4, 2, 3, 16, 64, dtype=dtype, device=device)
    turned, wanted_kv = qkv.clone(), kv.clone()
    cos_sin, slots = torch.randn(50, 64, device=device), torch.tensor([17, -1, 0, 63, 48], device=device)
    positions = torch.tensor([0, 49, 5, 5, 42], device=device)
    reference.rope(turned[:, :12], cos_sin, positions)
    reference.store_kv(turned[:, 9:12], turned[:, 12:], wanted_kv, slots)
    kernels.rope_store(qkv, kv, cos_sin, positions, slots)
    right = all(
        torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-6)
        for a, b in ((qkv[:, :9], turned[:, :9]), (kv, wanted_kv))
    )
    checks.that("rope_store as the reference", right)
    kernels.copy_blocks([kv], torch.tensor([3, 1], device=device), torch.tensor([2, 0], device=device))
    checks.that("copy_blocks", torch.equal(kv[[2, 0]], kv[[3, 1]]))
    host = torch.zeros(3, *kv.shape[1:], dtype=dtype)
    kernels.swap_blocks([kv], [host], torch.tensor([1, 2, 3]), torch.tensor([0, 2, 1]))
    kv_before = kv.clone()
    kernels.swap_blocks([host], [kv], torch.tensor([0, 1]), torch.tensor([3, 1]))
    checks.that("swap_blocks", torch.equal(kv[[3, 1]], kv_before[[1, 3]]))

    logits = torch.randn(rows, vocab, device=device) * 3
    index = torch.arange(rows, device=device)
    chosen = (
        torch.tensor([0.0, 1.0, 0.7, 1.3], device=device)[index % 4],
        torch.tensor([0, 0, 50], device=device)[index % 3],
        torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0], device=device)[index % 5],
        torch.tensor([0.0, 0.0, 0.0, 0.05], device=device)[index // 4 % 4],
        index * 977 + 5,
        index % 31,
    )
    drawn = kernels.sample(logits, *chosen).cpu()
    expected = reference.sample(logits.cpu(), *(values.cpu() for values in chosen))
    differ = int((drawn != expected).sum())
    # logarithms differ in the last place between devices; that decides a draw about once in a million
    checks.that(f"sampling: {differ} of {rows} draws differ from the reference's on the CPU", differ <= 1)
