"""Norms, activation and rotary embedding: the same cases on every implementation, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import Kernels
from tests.kernels.oracle import DTYPES, cos_sin, rotated

# One rounding of the result and one before the weight: two units in the last place, relative to numbers around 1.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
SIZES = [1, 7, 16, 31, 64, 576, 1000, 3000]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, times: float = 1.0) -> None:
    tolerance = times * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(ops: Kernels, device: torch.device, size: int, dtype: torch.dtype) -> None:
    x, weight = 3 * random(5, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    assert_close(ops.rms_norm(x.to(device), weight.to(device), 1e-5), norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_within_a_projection(ops: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    fused, weight = random(3, 10, 80, dtype=dtype), random(80, dtype=dtype, seed=1)
    assert_close(ops.rms_norm(fused.to(device)[:, 2:6], weight.to(device), 1e-5), norm(fused[:, 2:6], weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_changes_the_residual(ops: Kernels, device: torch.device, size: int, dtype: torch.dtype) -> None:
    x, residual = random(9, size, dtype=dtype), random(9, size, dtype=dtype, seed=1)
    weight, total = random(size, dtype=dtype, seed=2), (x.double() + residual.double()).to(dtype)
    on_device = residual.to(device, copy=True)
    normed = ops.add_rms_norm(x.to(device), on_device, weight.to(device), 1e-5)
    assert torch.equal(on_device.cpu(), total)
    assert_close(normed, norm(total, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(ops: Kernels, device: torch.device, size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * random(5, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(ops.silu_mul(gate_up.to(device)), gate * torch.sigmoid(gate) * up, 2)


def test_silu_mul_of_large_inputs(ops: Kernels, device: torch.device) -> None:
    gate = torch.tensor([-200.0, -90.0, -88.0, 0.0, 88.0, 90.0, 200.0, 1e30] * 4)
    got = ops.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None].to(device))[0]
    torch.testing.assert_close(got.cpu().double(), gate.double() * torch.sigmoid(gate.double()), rtol=1e-5, atol=1e-35)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 96, 128, 256])
def test_rope_turns_pairs_of_a_view_in_place(
    ops: Kernels, device: torch.device, head_dim: int, dtype: torch.dtype
) -> None:
    fused, table = random(6, 7, head_dim, dtype=dtype), cos_sin(100, head_dim)
    positions = torch.tensor([0, 1, 2, 50, 98, 99])
    on_device = fused.to(device, copy=True)
    ops.rope(on_device[:, 1:6], table.to(device), positions.to(device))
    assert_close(on_device[:, 1:6], rotated(fused[:, 1:6], table, positions))
    assert torch.equal(on_device[:, [0, 6]].cpu(), fused[:, [0, 6]])


def test_rows_do_not_depend_on_their_company(ops: Kernels, device: torch.device) -> None:
    x, weight = random(9, 576, dtype=torch.float32).to(device), random(576, dtype=torch.float32, seed=1).to(device)
    alone = [ops.rms_norm(x[row : row + 1], weight, 1e-5) for row in range(len(x))]
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), torch.cat(alone))
