"""What is sent: requests with fresh prompts for every round, from fixed lengths, quantiles or traces.

The same (seed, load, round) gives the same requests, so every engine of a round gets the same ones, and no two rounds
share a prompt.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

Line = TypeVar("Line")

# Lengths in tokens at these quantiles of the 79,725 ShareGPT conversations (first user turn and first reply, counted
# with OPT's tokenizer, input + output < 2048) of the artifact of "Efficient Memory Management for Large Language Model
# Serving with PagedAttention" (SOSP 2023). Their means are 161 and 338; the two are nearly independent (Pearson 0.04).
QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 1)
SHAREGPT_INPUT = (1, 2, 7, 9, 13, 15, 18, 24, 35, 55, 94, 133, 203, 506, 863, 1460, 2028)
SHAREGPT_OUTPUT = (1, 4, 22, 45, 101, 128, 157, 216, 271, 330, 405, 458, 525, 754, 899, 1280, 2009)
SHAREGPT_CONTEXT = 2048

# Each is one token with its leading space in the usual byte-level vocabularies, for endpoints that take text only.
WORDS = [
    *("time", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family"),
    *("student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "work"),
    *("program", "question", "government", "number", "night", "point", "home", "water", "room", "mother", "area"),
    *("money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue"),
]


@dataclass(frozen=True)
class Request:
    """One request. ``at``: seconds after the round's start that it is due, for loads whose requests come in time."""

    prompt: list[int] | str
    prompt_tokens: int
    max_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class TraceRow:
    at: float
    input: int
    output: int


class Prompts:
    """Random prompts: token ids between ``low`` and ``high``, or common words."""

    def __init__(self, rng: random.Random, low: int = 100, high: int = 40_000, words: bool = False) -> None:
        self._rng, self._low, self._high, self._words = rng, low, high, words

    def ids(self, count: int) -> list[int]:
        return [self._rng.randint(self._low, self._high) for _ in range(count)]

    def request(self, count: int, max_tokens: int, *, common: Sequence[int] = (), at: float = 0.0) -> Request:
        ids = [*common, *self.ids(count)]
        prompt = "".join(f" {WORDS[one % len(WORDS)]}" for one in ids) if self._words else ids
        return Request(prompt, len(ids), max_tokens, at)


def seeded(seed: int, load: str, round_index: int) -> random.Random:
    return random.Random(f"{seed}/{load}/{round_index}")


def inverse_cdf(values: Sequence[int], share: float) -> int:
    """The length at quantile ``share`` (0 to 1), linear between the known ones, at least 1."""
    for (q0, q1), (v0, v1) in zip(pairwise(QUANTILES), pairwise(values), strict=True):
        if share <= q1:
            return max(1, round(v0 + (v1 - v0) * (share - q0) / (q1 - q0)))
    raise ValueError(f"a quantile lies between 0 and 1, got {share}")


def sharegpt_lengths(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """``count`` (input, output) pairs, drawn independently but stratified, so that few of them have the right mean.

    Pairs that exceed the data's limit on the sum are drawn again, as the data was filtered.
    """

    def stratified(values: Sequence[int]) -> list[int]:
        lengths = [inverse_cdf(values, (stratum + rng.random()) / count) for stratum in range(count)]
        rng.shuffle(lengths)
        return lengths

    pairs = []
    for pair in zip(stratified(SHAREGPT_INPUT), stratified(SHAREGPT_OUTPUT), strict=True):
        while sum(pair) >= SHAREGPT_CONTEXT:
            pair = inverse_cdf(SHAREGPT_INPUT, rng.random()), inverse_cdf(SHAREGPT_OUTPUT, rng.random())
        pairs.append(pair)
    return pairs


def read_trace(path: Path) -> list[TraceRow]:
    """Azure's LLM inference trace (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's (JSONL: timestamp in
    ms, input_length, output_length), ``at`` in seconds from the first row. Raises ValueError that names the line.
    """

    def azure(line: dict[str, str]) -> TraceRow:
        at = datetime.fromisoformat(line["TIMESTAMP"]).timestamp()
        return TraceRow(at, int(line["ContextTokens"]), int(line["GeneratedTokens"]))

    def mooncake(line: str) -> TraceRow:
        row = json.loads(line)
        return TraceRow(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]))

    with path.open(newline="") as file:
        rows = (
            list(_parsed(path, 2, csv.DictReader(file), azure))
            if path.suffix == ".csv"
            else list(_parsed(path, 1, file, mooncake))
        )
    if not rows:
        raise ValueError(f"{path}: no rows")
    return [replace(row, at=row.at - rows[0].at) for row in rows]


def _parsed(path: Path, first: int, lines: Iterable[Line], parse: Callable[[Line], TraceRow]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, first):
        try:
            yield parse(line)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: neither Azure's CSV nor Mooncake's JSONL: {error!r}") from error


def trace_requests(
    rows: Sequence[TraceRow],
    prompts: Prompts,
    rng: random.Random,
    *,
    count: int,
    first: int,
    rate: float,
    max_model_len: int,
    own_times: bool = False,
) -> list[Request]:
    """``count`` requests of the trace from row ``first`` on (around its end, if need be), ``rate`` of them a second.

    Lengths are the trace's; rows that do not fit in max_model_len are passed over. Arrivals are Poisson, or the trace's
    own (own_times) stretched to the rate. Raises ValueError when too few rows fit.
    """
    usable = [row for row in rows if row.output > 0 and row.input > 0 and row.input + row.output <= max_model_len]
    if count > len(usable):
        raise ValueError(f"{len(usable)} of the trace's {len(rows)} rows fit in {max_model_len} tokens, {count} needed")
    start = first % (len(usable) - count + 1)
    taken = usable[start : start + count]
    if own_times:
        length = taken[-1].at - taken[0].at
        stretch = (count - 1) / rate / length if length else 0.0
        times = [(row.at - taken[0].at) * stretch for row in taken]
    else:
        times, now = [], 0.0
        for _ in taken:
            times.append(now)
            now += rng.expovariate(rate)
    return [prompts.request(row.input, row.output, at=at) for row, at in zip(taken, times, strict=True)]
