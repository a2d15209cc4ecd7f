"""What steps take, learnt from their timings; numpy's polyfit tells what the lines are to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.scheduler.step_costs import FORGET, SEEN, Line, StepCosts

POINTS = st.lists(st.tuples(st.integers(0, 4000), st.floats(1, 2)), min_size=2, max_size=30)


@given(POINTS, st.floats(0, 0.01))
def test_a_line_is_the_weighted_least_squares_fit(points: list[tuple[int, float]], slope: float) -> None:
    x = np.array([one for one, _ in points], dtype=float)
    y = np.array([noise + slope * one for one, noise in points])
    assume(np.ptp(x) >= 1)
    line = Line()
    for some in zip(x, y, strict=True):
        line.observe(*some)
    weights = FORGET ** np.arange(len(x))[::-1]
    wanted_slope, wanted_base = np.polyfit(x, y, 1, w=np.sqrt(weights))
    assume(wanted_slope >= 0 and wanted_base >= 0)
    assume(all(y[SEEN:] <= 2))  # nothing that could count as far off
    assert [line.base, line.slope] == pytest.approx([wanted_base, wanted_slope], rel=1e-5, abs=1e-9)


@given(POINTS)
def test_neither_part_of_a_line_is_ever_negative(points: list[tuple[int, float]]) -> None:
    line = Line()
    for x, y in points:
        line.observe(x, y - 1)
        assert line.base >= 0
        assert line.slope >= 0


def test_a_step_that_stood_still_is_not_believed_but_a_slower_machine_is() -> None:
    line = Line()
    for _ in range(20):
        line.observe(16, 0.01)
    line.observe(16, 5.0)
    assert line.at(16) < 0.02
    for _ in range(100):
        line.observe(16, 0.1)
    assert line.at(16) == pytest.approx(0.1, rel=0.01)


def taught(decode: tuple[float, float], token: tuple[float, float]) -> StepCosts:
    """Costs after steps that took exactly this."""
    costs = StepCosts()
    for rows in (8, 16, 32):
        costs.observe(decode[0] + decode[1] * rows, decodes=rows, prompt_tokens=0, contexts=0.0)
    for start in (0, 512, 2048):
        took = sum(token[0] + token[1] * (start + place) for place in range(100))
        costs.observe(decode[0] + decode[1] * 8 + took, decodes=8, prompt_tokens=100, contexts=100 * (start + 49.5))
    return costs


def test_a_prompt_costs_what_it_adds_to_the_decodes_of_its_steps() -> None:
    costs = taught((0.012, 0.0001), (0.0008, 1e-7))
    assert costs.decodes(24) == pytest.approx(0.0144)
    assert costs.decodes(0) == 0  # a step without decodes has none to wait for
    # 200 tokens from 1,000 on: contexts of 1,000 to 1,199.
    assert costs.prompt(1000, 200) == pytest.approx(200 * 0.0008 + 1e-7 * sum(range(1000, 1200)), rel=1e-4)


@given(st.floats(0, 1e-3), st.floats(0, 1e-6), st.integers(0, 100_000), st.floats(1e-4, 1.0), st.floats(1e-3, 0.1))
def test_the_most_tokens_within_a_time(base: float, slope: float, start: int, seconds: float, alone: float) -> None:
    assume(base > 1e-6)
    costs = taught((alone, 0.0), (base, slope))
    count = costs.tokens_within(seconds, start)
    assert costs.prompt(start, count) <= seconds * 1.000001
    assert costs.prompt(start, count + 1) > seconds * 0.999999


def test_before_both_kinds_of_step_were_seen_nothing_is_known() -> None:
    costs = StepCosts()
    costs.observe(0.01, decodes=1, prompt_tokens=0, contexts=0.0)
    assert not costs.known
    costs.observe(0.02, decodes=1, prompt_tokens=10, contexts=50.0)
    assert costs.known
