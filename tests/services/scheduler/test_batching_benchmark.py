"""The benchmark's two sides, against a count by hand."""

from __future__ import annotations

from benchmarks.continuous_batching import continuous, places_of, static


def test_three_places_and_six_requests_by_hand() -> None:
    tokens = (5, 50, 3, 4, 6, 2)
    ours = ["".join(places_of(plan, 3)) for plan in continuous(3, tokens)]
    assert ours == ["ABC"] * 3 + ["ABD"] * 2 + ["EBD"] * 2 + ["EBF"] * 2 + ["EB."] * 2 + [".B."] * 39
    theirs = ["".join(row) for row in static(3, tokens)]
    first = ["ABC"] * 3 + ["AB."] * 2 + [".B."] * 45
    assert theirs == [*first, "DEF", "DEF", "DE.", "DE.", ".E.", ".E."]
