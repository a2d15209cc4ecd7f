"""Norms, rotary embedding, activation, linear layers, stores and copies against float64 or plain indexing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cpu.kernels import CpuKernels
from kernels.quantized import QuantizedWeight, to_int4, to_int8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SIZES = [1, 7, 16, 31, 64, 576, 1000]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, times: float = 1.0) -> None:
    tolerance = RELATIVE[actual.dtype] * times
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", SIZES)
def test_rms_norm(kernels: CpuKernels, dtype: torch.dtype, columns: int) -> None:
    x, weight = random(5, columns, dtype=dtype), random(columns, dtype=dtype, seed=1)
    assert_close(kernels.rms_norm(x, weight, 1e-5), norm(x, weight, 1e-5), 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_within_fused_rows(kernels: CpuKernels, dtype: torch.dtype) -> None:
    fused, weight = random(3, 10, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    assert_close(kernels.rms_norm(fused[:, 2:6], weight, 1e-6), norm(fused[:, 2:6], weight, 1e-6), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", SIZES)
def test_add_rms_norm(kernels: CpuKernels, dtype: torch.dtype, columns: int) -> None:
    x, residual = random(40, columns, dtype=dtype), random(40, columns, dtype=dtype, seed=1)
    weight, total = random(columns, dtype=dtype, seed=2), x.clone() + residual
    out = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(out, norm(total, weight, 1e-5), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", SIZES)
def test_silu_mul(kernels: CpuKernels, dtype: torch.dtype, columns: int) -> None:
    gate_up = 4 * random(33, 2 * columns, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(kernels.silu_mul(gate_up), gate * torch.sigmoid(gate) * up, 4)


def test_silu_mul_of_large_inputs(kernels: CpuKernels) -> None:
    gate = torch.tensor([-200.0, -90.0, -88.0, 0.0, 88.0, 90.0, 200.0, 1e30] * 4)
    out = kernels.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    torch.testing.assert_close(out.double(), gate.double() * torch.sigmoid(gate.double()), rtol=1e-5, atol=1e-35)


def table(positions: int, head_dim: int) -> torch.Tensor:
    angles = torch.arange(positions).double()[:, None] / 10000 ** (torch.arange(0, head_dim, 2).double() / head_dim)
    return torch.cat([angles.cos(), angles.sin()], -1).float()


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """By complex multiplication, in float64."""
    real, imaginary = x.double().chunk(2, -1)
    cos, sin = cos_sin[positions][:, None].double().chunk(2, -1)
    turned = torch.complex(real, imaginary) * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 96, 128, 256])
def test_rope(kernels: CpuKernels, dtype: torch.dtype, head_dim: int) -> None:
    fused, cos_sin = random(6, 7, head_dim, dtype=dtype), table(100, head_dim)
    positions = torch.tensor([0, 1, 2, 50, 98, 99])
    before = fused.clone()
    kernels.rope(fused[:, :5], cos_sin, positions)
    assert_close(fused[:, :5], rotated(before[:, :5], cos_sin, positions), 2)
    assert torch.equal(fused[:, 5:], before[:, 5:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
def test_rope_store(kernels: CpuKernels, dtype: torch.dtype, block_size: int) -> None:
    heads, kv_heads, head_dim, tokens = 6, 2, 64, 9
    qkv, cos_sin = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype), table(40, head_dim)
    positions = torch.arange(20, 20 + tokens)
    kv = torch.full((12, 2, kv_heads, block_size, head_dim), 7.0, dtype=dtype)
    slots = torch.randperm(12 * block_size, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[4] = -1
    before = qkv.clone()
    kernels.rope_store(qkv, kv, cos_sin, positions, slots)
    assert_close(qkv[:, :heads], rotated(before[:, :heads], cos_sin, positions), 2)
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    turned = rotated(before[:, heads : heads + kv_heads], cos_sin, positions)
    untouched = torch.ones(12 * block_size, dtype=torch.bool)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            stored = kv[slot // block_size, :, :, slot % block_size]
            assert_close(stored[0], turned[t], 2)
            assert torch.equal(stored[1], before[t, heads + kv_heads :])
            untouched[slot] = False
    rest = kv.transpose(2, 3).transpose(1, 2).reshape(12 * block_size, -1)[untouched]
    assert (rest == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_store_kv(kernels: CpuKernels, dtype: torch.dtype, block_size: int) -> None:
    fused = random(50, 6, 80, dtype=dtype)
    k, v = fused[:, 2:4], fused[:, 4:]
    kv = torch.zeros(80 // block_size, 2, 2, block_size, 80, dtype=dtype)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(3))[:50]
    slots[7] = -1
    kernels.store_kv(k, v, kv, slots)
    expected = torch.zeros_like(kv)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 0, :, slot % block_size] = k[t]
            expected[slot // block_size, 1, :, slot % block_size] = v[t]
    assert torch.equal(kv, expected)


def test_copy_and_swap_blocks(kernels: CpuKernels) -> None:
    kvs = [random(10, 2, 3, 16, 64, dtype=torch.bfloat16, seed=i) for i in range(2)]
    before = [kv.clone() for kv in kvs]
    kernels.copy_blocks(kvs, torch.tensor([1, 1, 5]), torch.tensor([2, 9, 0]))
    for kv, old in zip(kvs, before, strict=True):
        assert torch.equal(kv, old[[5, 1, 1, 3, 4, 5, 6, 7, 8, 1]])
    host = torch.zeros(4, 2, 3, 16, 64, dtype=torch.bfloat16)
    kernels.swap_blocks(kvs[:1], [host], torch.tensor([3, 8]), torch.tensor([0, 2]))
    assert torch.equal(host[[0, 2]], kvs[0][[3, 8]]) and not host[[1, 3]].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 32, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (96, 64), (100, 50), (960, 576)])
def test_linear(kernels: CpuKernels, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2)
    expected = x.double() @ weight.double().T
    size = inputs**0.5  # of a result; float32 sums lose a little of it
    absolute = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype] * size
    out = kernels.linear(weight)(x)
    torch.testing.assert_close(out.double(), expected, atol=absolute, rtol=RELATIVE[dtype])
    out = kernels.linear(weight, bias)(x)
    torch.testing.assert_close(out.double(), expected + bias.double(), atol=absolute, rtol=RELATIVE[dtype])


def test_linear_rows_have_the_same_bits_in_any_batch(kernels: CpuKernels) -> None:
    x, layer = random(37, 128, dtype=torch.bfloat16), kernels.linear(random(200, 128, dtype=torch.bfloat16, seed=1))
    together = layer(x)
    for begin, end in ((0, 1), (1, 9), (5, 37)):
        assert torch.equal(layer(x[begin:end]), together[begin:end])


def test_linear_of_a_part_of_wider_rows(kernels: CpuKernels) -> None:
    wide, weight = random(4, 100, dtype=torch.bfloat16), random(40, 64, dtype=torch.bfloat16, seed=1)
    layer = kernels.linear(weight)
    for begin in (0, 2, 3):
        assert torch.equal(layer(wide[:, begin : begin + 64]), layer(wide[:, begin : begin + 64].contiguous()))


def test_linear_without_rows(kernels: CpuKernels) -> None:
    layer = kernels.linear(random(40, 64, dtype=torch.float32))
    assert layer(torch.empty(0, 64)).shape == (0, 40)


def test_an_odd_number_of_inputs(kernels: CpuKernels) -> None:
    x, weight = random(3, 7, dtype=torch.float32), random(4, 7, dtype=torch.float32, seed=1)
    torch.testing.assert_close(kernels.linear(weight)(x), x @ weight.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 17, 1000, 49152])
def test_argmax_takes_the_first_of_equals(kernels: CpuKernels, dtype: torch.dtype, columns: int) -> None:
    logits = random(5, columns, dtype=dtype)
    logits[1] = 2.5
    logits[2, -1] = 1000
    logits[3] = float("-inf")
    logits[4, columns // 2 :] = 500
    expected = [logits[0].tolist().index(max(logits[0].tolist())), 0, columns - 1, 0, columns // 2]
    assert kernels.argmax(logits).tolist() == expected


QUANTIZED = {
    "int8": to_int8,
    "int8 by 32, two digits": lambda weight: replace(to_int8(weight, 32), digits=2),
    "int4": to_int4,
    "int4, two digits": lambda weight: replace(to_int4(weight), digits=2),
    "8 bits with minimums": lambda weight: QuantizedWeight.stacked([to_int8(weight[:1], 32), to_int4(weight[1:])]),
}


def rounded(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x in float64 after rounding to integers of the weight's digits, with a scale for each group along its rows."""
    parts = x.double().unflatten(-1, (-1, weight.group))
    limit = 127 if weight.digits == 1 else 127 * 256 + 127
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / limit
    return ((parts / scale).round() * scale).flatten(-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("rows", [1, 5, 13, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(2, 64), (100, 128), (960, 576)])
def test_quantized_linear(
    kernels: CpuKernels, dtype: torch.dtype, kind: str, rows: int, outputs: int, inputs: int
) -> None:
    x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype, seed=2)
    x[0] = 0
    weight = QUANTIZED[kind](random(outputs, inputs, dtype=dtype, seed=1))
    layer = kernels.quantized_linear(weight, bias, dtype)
    out = layer(x)
    values = weight.dequantize(torch.float64)
    minimums = torch.zeros_like(values)
    if weight.minimums is not None:  # these meet the inputs as they are
        minimums = weight.minimums.double().repeat_interleave(weight.group, 1)
    expected = rounded(x, weight) @ (values - minimums).T + x.double() @ minimums.T + bias.double()
    # A tie may be rounded the other way: by one step of an input.
    absolute = (0.01 if weight.digits == 1 else 1e-4) * inputs**0.5
    torch.testing.assert_close(out.double(), expected, atol=absolute, rtol=RELATIVE[dtype])
    assert all(torch.equal(layer(x[begin : begin + 3]), out[begin : begin + 3]) for begin in range(0, rows, 11))


def test_two_digits_of_inputs_are_finer_than_bfloat16(kernels: CpuKernels) -> None:
    x = random(7, 576, dtype=torch.float32)
    weight = replace(to_int4(random(100, 576, dtype=torch.float32, seed=1)), digits=2)
    exact = x.double() @ weight.dequantize(torch.float64).T
    errors = [
        (kernels.quantized_linear(how, None, torch.float32)(x) - exact).square().mean()
        for how in (weight, replace(weight, digits=1))
    ]
    bfloat16 = (x.bfloat16().double() @ weight.dequantize(torch.float64).T - exact).square().mean()
    assert errors[0] < bfloat16 / 1000 < errors[1]


def test_groups_that_are_no_multiple_of_32_are_dequantised(kernels: CpuKernels) -> None:
    x, weight = random(3, 96, dtype=torch.bfloat16), to_int8(random(40, 96, dtype=torch.bfloat16, seed=1), 16)
    expected = kernels.linear(weight.dequantize(torch.bfloat16))(x)
    assert torch.equal(kernels.quantized_linear(weight, None, torch.bfloat16)(x), expected)
