"""Norms, rotary embedding and the gated activation, a row a program; float32 inside whatever the dtype outside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.lang import cast

_SILU_COLUMNS = 2048


@triton.jit(do_not_specialize=["heads"])
def rms_norm_kernel(out, x, weight, eps, heads, x_row_stride, x_head_stride, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Program (r, h): row h of x[r]. Rounds to the tensor's dtype before the weight, as Llama's norm does."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, PAD)
    mask = column < SIZE
    value = tl.load(x + row * x_row_stride + head * x_head_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = cast(value * scale, x.dtype.element_ty).to(tl.float32)
    weighted = normed * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + (row * heads + head) * SIZE + column, cast(weighted, out.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_kernel(
    out, x, residual, weight, eps, x_row_stride, residual_row_stride, SIZE: tl.constexpr, PAD: tl.constexpr
):
    """Program r: residual[r] += x[r], and its norm. The norm is of the sum as stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    mask = column < SIZE
    value = tl.load(x + row * x_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    place = residual + row * residual_row_stride + column
    value = cast(value + tl.load(place, mask=mask, other=0.0).to(tl.float32), residual.dtype.element_ty)
    tl.store(place, value, mask=mask)
    value = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / SIZE + eps)
    normed = cast(value * scale, x.dtype.element_ty).to(tl.float32)
    weighted = normed * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, cast(weighted, out.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(out, gate_up, row_stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (r, part): silu(gate) * up of one part of row r."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    place = gate_up + row * row_stride + column
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=mask, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # never overflows
    sigmoid = tl.where(gate < 0, small, 1.0) / (1.0 + small)
    activated = cast(gate * sigmoid, gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + column, cast(activated * up, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rope_kernel(
    x,
    cos_sin,
    positions,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Program t rotates all heads of token t by its position; element i is paired with element i + D / 2."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    element = tl.arange(0, HALF_PAD)
    head = tl.arange(0, HEADS_PAD)[:, None]
    row = cos_sin + tl.load(positions + token) * HEAD_DIM + element
    cos = tl.load(row, mask=element < half, other=0.0)[None, :]
    sin = tl.load(row + half, mask=element < half, other=0.0)[None, :]
    mask = (head < HEADS) & (element < half)[None, :]
    place = x + token * token_stride + head * head_stride + element[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, cast(first * cos - second * sin, x.dtype.element_ty), mask=mask)
    tl.store(place + half, cast(second * cos + first * sin, x.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm over the last dimension of ``x [T, size]`` or ``[T, heads, size]``; see ``kernels.ops``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    rows, heads, size = x.shape if x.dim() == 3 else (x.numel() // x.shape[-1], 1, x.shape[-1])
    row_stride, head_stride = (x.stride(0), x.stride(1)) if x.dim() == 3 else (x.stride(-2), size)
    rms_norm_kernel[(rows, heads)](
        out, x, weight, eps, heads, row_stride, head_stride,
        SIZE=size, PAD=triton.next_power_of_2(size), num_warps=_warps(size),
    )  # fmt: skip
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds ``x [T, size]`` to ``residual`` in place and returns the norm of that."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    rows, size = x.shape
    add_rms_norm_kernel[(rows,)](
        out, x, residual, weight, eps, x.stride(0), residual.stride(0),
        SIZE=size, PAD=triton.next_power_of_2(size), num_warps=_warps(size),
    )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2 I]``, gate in the first half. Returns [T, I]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if not out.numel():
        return out
    silu_mul_kernel[(rows, triton.cdiv(size, _SILU_COLUMNS))](
        out, gate_up, gate_up.stride(0), SIZE=size, COLUMNS=_SILU_COLUMNS, num_warps=4
    )
    return out


def rope(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotates ``x [T, heads, D]`` in place by each token's position; see ``kernels.ops``."""
    tokens, heads, head_dim = x.shape
    if not tokens:
        return
    rope_kernel[(tokens,)](
        x, cos_sin, positions, x.stride(0), x.stride(1),
        HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads),
        HEAD_DIM=head_dim, HALF_PAD=triton.next_power_of_2(head_dim // 2), num_warps=4,
    )  # fmt: skip


def _warps(size: int) -> int:
    """A row of ``size`` elements, at 8 or more a thread."""
    return min(16, max(1, int(triton.next_power_of_2(size)) // 512))
