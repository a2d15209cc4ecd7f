"""Percentiles, spreads, ratios and the order of rounds, against the standard library and by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from benchmarks.stats import Spread, in_turn, percentile, ratios


@pytest.mark.parametrize("count", [2, 3, 100, 257])
def test_percentile_is_the_standard_librarys(count: int) -> None:
    rng = random.Random(count)
    values = [rng.expovariate(1) for _ in range(count)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent, expected in enumerate(cuts, 1):
        assert percentile(values, percent / 100) == pytest.approx(expected)


def test_percentile_at_the_ends() -> None:
    assert percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert percentile([3.0, 1.0, 2.0], 1) == 3.0
    assert percentile([5.0], 0.99) == 5.0
    assert math.isnan(percentile([], 0.5))


def test_spread_passes_over_unknown_rounds() -> None:
    assert Spread.of([4.0, math.nan, 1.0, 2.0]) == Spread(2.0, 1.0, 4.0)
    assert math.isnan(Spread.of([math.nan]).median)


def test_ratios_pair_rounds() -> None:
    # The machine was twice as slow in the second round: each round still says 3x.
    assert ratios([6.0, 3.0, 6.0], [2.0, 1.0, 2.0]) == Spread(3.0, 3.0, 3.0)
    assert ratios([1.0, 4.0], [2.0, 1.0]) == Spread(2.25, 0.5, 4.0)
    assert ratios([1.0, 4.0, 9.0], [2.0, 1.0]) == Spread(2.25, 0.5, 4.0)  # the run broke off


def test_each_engine_has_each_place_equally_often() -> None:
    orders = [in_turn(["a", "b", "c"], index) for index in range(6)]
    assert orders[:3] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]
