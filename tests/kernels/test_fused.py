"""Norms, rotary embedding and activation against float64 formulas."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import select

ops = select(torch.device("cpu"), "reference")

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@DTYPES
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = randn(5, 96, dtype=dtype), randn(96, dtype=dtype)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).double(), wanted, rtol=tolerance, atol=tolerance)


@DTYPES
def test_add_rms_norm_changes_the_residual(dtype: torch.dtype, tolerance: float) -> None:
    x, residual, weight = randn(5, 96, dtype=dtype), randn(5, 96, dtype=dtype) + 1, randn(96, dtype=dtype)
    total = x.double() + residual.double()
    normed = ops.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(residual.double(), total, rtol=tolerance, atol=tolerance)
    wanted = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), wanted, rtol=2 * tolerance, atol=2 * tolerance)


@DTYPES
def test_silu_mul(dtype: torch.dtype, tolerance: float) -> None:
    x = randn(5, 64, dtype=dtype)
    gate, up = x[:, :32].double(), x[:, 32:].double()
    wanted = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(ops.silu_mul(x).double(), wanted, rtol=tolerance, atol=tolerance)


@DTYPES
def test_rope_turns_pairs_of_a_view_in_place(dtype: torch.dtype, tolerance: float) -> None:
    whole = randn(3, 5, 64, dtype=dtype)
    x, rest = whole[:, :4], whole[:, 4:].clone()
    angles = torch.rand(10, 32, generator=torch.Generator().manual_seed(1)) * 6
    positions = torch.tensor([9, 0, 4])
    pairs = torch.complex(x[..., :32].double(), x[..., 32:].double())
    turned = pairs * torch.polar(torch.ones(3, 1, 32).double(), angles[positions, None].double())
    ops.rope(x, torch.cat([angles.cos(), angles.sin()], dim=1), positions)
    wanted = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(x.double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(whole[:, 4:], rest)
