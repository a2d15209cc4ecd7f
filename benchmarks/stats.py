"""The benchmarks' own arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of them lie, interpolated linearly; NaN of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of one figure over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        known = [value for value in values if value == value]
        if not known:
            return cls(float("nan"), float("nan"), float("nan"))
        return cls(statistics.median(known), min(known), max(known))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, round by round: rounds that lie side by side share the machine's mood, medians do not.

    A last round that only one of them has, because the run broke off, is left out.
    """
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=False) if b])


def in_turn(names: Sequence[str], round_index: int) -> list[str]:
    """The order of a round: each is first, second, ... equally often, so that drift and heat favour nobody."""
    start = round_index % len(names)
    return [*names[start:], *names[:start]]
