"""Norms, activation and rotary embedding against float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernels.triton as kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One rounding of the result, another of the value before the weight: two units in the last place.
RELATIVE = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.isfinite().all()
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=RELATIVE[got.dtype], atol=1e-6)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 576, 2560])
def test_rms_norm(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = (torch.randn(5, size) * 3).to(dtype), torch.randn(size).to(dtype)
    close(kernels.rms_norm(x.to(device), weight.to(device), 1e-5), norm(x, weight))


def test_rms_norm_of_heads_within_a_projection(device: torch.device) -> None:
    x, weight = torch.randn(3, 6, 80), torch.randn(80)
    got = kernels.rms_norm(x.to(device)[:, 1:4], weight.to(device), 1e-5)
    close(got, norm(x[:, 1:4], weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = torch.randn(5, 576).to(dtype), torch.randn(5, 576).to(dtype), torch.randn(576).to(dtype)
    summed = (x.double() + residual.double()).to(dtype)
    on_device = residual.to(device)
    got = kernels.add_rms_norm(x.to(device), on_device, weight.to(device), 1e-5)
    assert torch.equal(on_device.cpu(), summed)
    close(got, norm(summed, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [24, 3000])
def test_silu_mul(size: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (torch.randn(3, 2 * size) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    close(kernels.silu_mul(gate_up.to(device)), gate / (1 + torch.exp(-gate)) * up)


def test_silu_mul_of_extremes(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]], device=device)
    assert kernels.silu_mul(gate_up).tolist() == [[0.0, 200.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_rope(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Each pair is a complex number, turned by the position's angle."""
    fused = torch.randn(4, 7, head_dim).to(dtype)
    half = head_dim // 2
    angles = torch.arange(50)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    positions = torch.tensor([0, 49, 3, 3])
    x = fused.double()[:, 1:6]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles[positions]).double(), angles[positions].double()
    ).unsqueeze(1)
    wanted = torch.cat([turned.real, turned.imag], dim=-1)

    on_device = fused.to(device)
    kernels.rope(on_device[:, 1:6], cos_sin.to(device), positions.to(device))
    tolerance = 4 * RELATIVE[dtype] if dtype != torch.float32 else 1e-5  # of the table's float32 angles
    torch.testing.assert_close(on_device[:, 1:6].cpu().double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(on_device[:, 0].cpu(), fused[:, 0])
    assert torch.equal(on_device[:, 6].cpu(), fused[:, 6])


def test_rows_do_not_depend_on_their_company(device: torch.device) -> None:
    x, weight = torch.randn(9, 576, device=device), torch.randn(576, device=device)
    together = kernels.rms_norm(x, weight, 1e-5)
    alone = torch.cat([kernels.rms_norm(x[row : row + 1], weight, 1e-5) for row in range(len(x))])
    assert torch.equal(together, alone)
    assert math.isfinite(float(together.sum()))
