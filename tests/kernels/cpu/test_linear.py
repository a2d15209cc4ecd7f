"""Linear layers over packed weights, quantised or not, against float64; the likeliest of a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cpu.kernels import CpuKernels
from kernels.quantized import QuantizedWeight, to_int4, to_int8
from tests.kernels.oracle import DTYPES

RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
