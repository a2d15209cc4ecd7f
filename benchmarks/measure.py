"""From a round's answers to its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.answers import Answer
from benchmarks.drive import Drive
from benchmarks.stats import percentile

NAN = float("nan")


@dataclass(frozen=True)
class Metric:
    """A figure's heading and how it is written; all are kept in base units (tokens, seconds, bytes, shares of 1)."""

    title: str
    show: Callable[[float], str]


def _ms(value: float) -> str:
    return f"{value * 1e3:.0f}" if value >= 0.1 else f"{value * 1e3:.1f}"


def _share(value: float) -> str:
    return f"{value:.0%}"


METRICS = {
    "tokens_per_s": Metric("output tokens/s", lambda value: f"{value:.0f}" if value >= 100 else f"{value:.1f}"),
    "ttft_p50": Metric("TTFT p50 ms", _ms),
    "ttft_p99": Metric("TTFT p99 ms", _ms),
    "tpot_p50": Metric("TPOT p50 ms", _ms),
    "tpot_p99": Metric("TPOT p99 ms", _ms),
    "gap_p99_alone": Metric("inter-token p99 alone ms", _ms),
    "gap_p99_with": Metric("with long prompt ms", _ms),
    "gap_growth": Metric("with / alone", lambda value: f"{value:.2f}"),
    "long_ttft": Metric("long prompt's TTFT ms", _ms),
    "hit_rate": Metric("prefix hits", _share),
    "memory": Metric("peak memory MiB", lambda value: f"{value / 2**20:.0f}"),
}
GENERAL = ("tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
LONG = ("tokens_per_s", "gap_p99_alone", "gap_p99_with", "gap_growth", "long_ttft")


@dataclass
class Result:
    """One engine's round. ``ids``: of each answer, in the requests' order, where asked for."""

    engine: str
    load: str
    round: int
    metrics: dict[str, float]
    requests: int
    tokens: int
    seconds: float
    faults: list[str] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    engine_cpu_s: float = NAN
    client_cpu_s: float = NAN
    others_share: float = NAN
    ids: list[list[int]] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """For JSON: without ids, and null for what is not known."""
        known = asdict(self)
        del known["ids"]
        known["metrics"] = {name: None if math.isnan(value) else value for name, value in self.metrics.items()}
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in known.items()}


def faults(answers: Sequence[Answer]) -> list[str]:
    return [f"request {index}: {fault}" for index, answer in enumerate(answers) for fault in answer.faults()]


def general(drive: Drive) -> dict[str, float]:
    """Figures of a round over its answers without error. TTFT counts from when a request was due."""
    came = [answer for answer in drive.answers if answer.times]
    figures = latencies([one.ttft for one in came], [one.tpot for one in came if one.tokens > 1])
    return {"tokens_per_s": drive.tokens / drive.seconds, **figures}


def latencies(ttft: Sequence[float], tpot: Sequence[float]) -> dict[str, float]:
    return {
        "ttft_p50": percentile(ttft, 0.5),
        "ttft_p99": percentile(ttft, 0.99),
        "tpot_p50": percentile(tpot, 0.5),
        "tpot_p99": percentile(tpot, 0.99),
    }


def hit_rate(answers: Sequence[Answer]) -> float:
    """Share of prompt tokens that came from a cache, as the endpoint itself reports; NaN if it does not."""
    told = [answer for answer in answers if answer.cached_tokens is not None and answer.prompt_tokens]
    total = sum(answer.prompt_tokens or 0 for answer in told)
    return sum(answer.cached_tokens or 0 for answer in told) / total if total else NAN


def long_prompt(drive: Drive, streams: int) -> dict[str, float]:
    """Gaps between the streams' tokens, before the first long prompt and while one is in work.

    Only while all streams run: from the last one's first token to the first one's last.
    """
    running, long = drive.answers[:streams], drive.answers[streams:]
    if not long or any(not answer.times for answer in drive.answers):
        return {"tokens_per_s": drive.tokens / drive.seconds} | dict.fromkeys(LONG[1:], NAN)
    begin = max(answer.times[0] for answer in running)
    end = min(answer.times[-1] for answer in running)
    arrives = long[0].due
    alone, during = (
        [
            after - before
            for answer in running
            for before, after in pairwise(answer.times)
            if low <= before and after <= high
        ]
        for low, high in ((begin, arrives), (arrives, min(end, long[-1].times[-1])))
    )
    p99_alone, p99_with = percentile(alone, 0.99), percentile(during, 0.99)
    return {
        "tokens_per_s": drive.tokens / drive.seconds,
        "gap_p99_alone": p99_alone,
        "gap_p99_with": p99_with,
        "gap_growth": p99_with / p99_alone,
        "long_ttft": percentile([answer.ttft for answer in long], 0.5),
    }
