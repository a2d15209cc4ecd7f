"""Rounding of weights: errors against what the number of steps allows, and what stacking and reordering keep."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import select
from kernels.quantized import QuantizedWeight, to_int4, to_int8


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("group", [32, 64])
def test_int8_is_half_a_step_off_at_most(group: int) -> None:
    weight = weights(70, 192)
    parts = weight.unflatten(1, (-1, group))
    half_step = parts.abs().amax(2, keepdim=True) / 254
    error = (to_int8(weight, group).dequantize(torch.float32).unflatten(1, (-1, group)) - parts).abs()
    assert (error <= half_step * 1.07).all()  # the scale has 11 bits: its rounding adds 127 times 2^-12 steps


def test_int4_is_never_worse_than_even_steps_from_least_to_greatest() -> None:
    weight = weights(70, 192)
    weight[0, 0], weight[1] = 3.0, 0.25
    parts = weight.unflatten(1, (-1, 32)).double()
    least = parts.amin(2, keepdim=True)
    step = ((parts.amax(2, keepdim=True) - least) / 15).clamp_min(1e-12)
    plain = (((parts - least) / step).round() * step + least - parts).square().sum(2)
    quantized = to_int4(weight)
    error = (quantized.dequantize(torch.float64).unflatten(1, (-1, 32)) - parts).square().sum(2)
    assert (error <= plain * 1.01 + 1e-9).all() and error.sum() < 0.95 * plain.sum()
    assert torch.equal(quantized.dequantize(torch.float32)[1], weight[1])  # all of a group equal
    assert quantized.codes.max() <= 15


@pytest.mark.parametrize("rounding", [to_int8, to_int4])
def test_zeros_and_the_smallest_stay_finite(rounding: object) -> None:
    weight = torch.zeros(3, 64)
    weight[1, 5], weight[2] = 1e-9, 1e-7
    values = rounding(weight).dequantize(torch.float32)  # type: ignore[operator]
    assert values.isfinite().all() and not values[0].any() and (values - weight).abs().max() <= 1.1e-7


def test_stacking_keeps_every_value() -> None:
    parts = [to_int8(weights(5, 64), 32), to_int4(weights(7, 64, seed=1)), to_int8(weights(2, 64, seed=2), 32)]
    stacked = QuantizedWeight.stacked(parts)
    expected = torch.cat([part.dequantize(torch.float64) for part in parts])
    torch.testing.assert_close(stacked.dequantize(torch.float64), expected, rtol=0, atol=1e-7)
    assert (stacked.bits, stacked.shape) == (8, (14, 64))
    order = torch.tensor([3, 0, 13])
    assert torch.equal(
        stacked.reordered(lambda rows: rows[order]).dequantize(torch.float64), stacked.dequantize(torch.float64)[order]
    )


def test_the_reference_multiplies_what_codes_stand_for() -> None:
    weight, bias, x = to_int4(weights(9, 64)), weights(9, seed=1), weights(4, 64, seed=2)
    layer = select(torch.device("cpu"), "reference").quantized_linear(weight, bias, torch.float32)
    torch.testing.assert_close(layer(x), x @ weight.dequantize(torch.float32).T + bias)
