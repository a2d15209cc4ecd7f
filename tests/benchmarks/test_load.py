"""What is sent: quantile sampling by hand count, traces as their publishers write them, arrivals and fresh prompts."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.load import (
    SHAREGPT_INPUT,
    SHAREGPT_OUTPUT,
    Prompts,
    TraceRow,
    inverse_cdf,
    read_trace,
    seeded,
    sharegpt_lengths,
    trace_requests,
)


@pytest.mark.parametrize(
    ("share", "length"),
    [
        (0, 1),
        (0.01, 2),
        (0.5, 35),
        (0.55, 45),  # half-way between 35 and 55
        (0.775, 168),  # half-way between 133 and 203
        (0.97, 1162),  # half-way between 863 and 1460, 1161.5, rounded to even
        (1, 2028),
    ],
)
def test_inverse_cdf_by_hand(share: float, length: int) -> None:
    assert inverse_cdf(SHAREGPT_INPUT, share) == length


def test_inverse_cdf_refuses_what_is_no_quantile() -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        inverse_cdf(SHAREGPT_INPUT, 1.5)


def test_sharegpt_lengths_have_the_datas_means_and_limit() -> None:
    pairs = [pair for round_index in range(20) for pair in sharegpt_lengths(random.Random(round_index), 96)]
    assert max(map(sum, pairs)) < 2048
    # The data's own means, 161 and 338; the linear table is a little heavier in its tails.
    assert statistics.mean(pair[0] for pair in pairs) == pytest.approx(161, rel=0.08)
    assert statistics.mean(pair[1] for pair in pairs) == pytest.approx(338, rel=0.05)


def test_few_sharegpt_lengths_have_their_quartiles() -> None:
    outputs = [output for _, output in sharegpt_lengths(random.Random(1), 40)]
    # Of 40, ten lie below the 0.25 quantile and twenty below the median, but for the pair or two that were drawn again.
    assert abs(sum(output < SHAREGPT_OUTPUT[5] for output in outputs) - 10) <= 2
    assert abs(sum(output < SHAREGPT_OUTPUT[8] for output in outputs) - 20) <= 2


def test_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-17 18:15:46.6805900,7,8\n"
    )
    rows = read_trace(path)
    assert [(row.input, row.output) for row in rows] == [(374, 44), (396, 109), (7, 8)]
    assert [row.at for row in rows] == pytest.approx([0, 4.314579, 86400], abs=2e-6)


def test_mooncake_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
        '{"timestamp": 3052, "input_length": 12, "output_length": 3, "hash_ids": [0]}\n'
    )
    rows = read_trace(path)
    assert [(row.input, row.output) for row in rows] == [(6758, 500), (12, 3)]
    assert [row.at for row in rows] == pytest.approx([0, 0.052])


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,2\n2023-11-16 18:15:47,x,2\n",
            "csv:3",
        ),
        ("a.csv", "time,in,out\n1,2,3\n", "csv:2"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 2}\n{"timestamp": 1}\n', "jsonl:2"),
        ("a.jsonl", "", "no rows"),
    ],
)
def test_a_bad_trace_names_its_line(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=line):
        read_trace(tmp_path / name)


ROWS = [TraceRow(at=float(index), input=10 + index, output=5) for index in range(10)]
ROWS[3] = TraceRow(3.0, 4000, 5)


def test_a_trace_comes_in_its_own_order_and_passes_over_what_is_too_long() -> None:
    some = trace_requests(
        ROWS, Prompts(random.Random(1)), random.Random(1), count=4, first=2, rate=1, max_model_len=2048
    )
    assert [one.prompt_tokens for one in some] == [12, 14, 15, 16]
    assert [len(one.prompt) for one in some] == [12, 14, 15, 16]
    with pytest.raises(ValueError, match="9 of the trace's 10 rows fit in 2048 tokens, 10 needed"):
        trace_requests(ROWS, Prompts(random.Random(1)), random.Random(1), count=10, first=0, rate=1, max_model_len=2048)


def test_its_own_times_are_stretched_to_the_rate() -> None:
    some = trace_requests(
        ROWS,
        Prompts(random.Random(1)),
        random.Random(1),
        count=4,
        first=2,
        rate=0.5,
        max_model_len=2048,
        own_times=True,
    )
    # Rows of seconds 2, 4, 5, 6: three intervals at 0.5 a second are 6 s, the trace's are 4 s.
    assert [one.at for one in some] == pytest.approx([0, 3, 4.5, 6])


def test_poisson_arrivals_have_the_rate_and_the_variance() -> None:
    rows = [TraceRow(0.0, 5, 5)] * 4001
    some = trace_requests(
        rows, Prompts(random.Random(1)), random.Random(2), count=4001, first=0, rate=4, max_model_len=2048
    )
    gaps = [after.at - before.at for before, after in pairwise(some)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.08)  # exponential: as its mean


def test_prompts_are_the_same_for_engines_and_new_in_every_round() -> None:
    def prompt(round_index: int) -> list[int] | str:
        return Prompts(seeded(7, "fixed:8", round_index)).request(64, 1).prompt

    assert prompt(0) == prompt(0)
    assert prompt(0)[:16] != prompt(1)[:16]
    assert seeded(7, "fixed:8", 0).random() != seeded(7, "fixed:32", 0).random()


def test_words_are_as_many_as_tokens_asked_for() -> None:
    request = Prompts(random.Random(1), words=True).request(32, 1, common=[1, 2])
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == request.prompt_tokens == 34
