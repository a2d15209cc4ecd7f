"""Tables of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.measure import METRICS, Result
from benchmarks.stats import Spread, ratios


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, its columns aligned."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


class Report:
    """The results of all rounds, by load and engine. The first engine is the one the others are compared with."""

    def __init__(self, engines: Sequence[str], loads: Sequence[str], metrics: dict[str, Sequence[str]]) -> None:
        self._engines, self._loads, self._metrics = engines, loads, metrics
        self._rounds: dict[tuple[str, str], list[Result]] = {}
        self._same_ids: dict[tuple[str, str], float] = {}

    def add(self, result: Result) -> None:
        self._rounds.setdefault((result.load, result.engine), []).append(result)

    def add_same_ids(self, load: str, engine: str, share: float) -> None:
        self._same_ids[load, engine] = share

    @property
    def results(self) -> list[Result]:
        return [result for rounds in self._rounds.values() for result in rounds]

    def ratios(self) -> str:
        """The first engine over each other one, per round; median and, in brackets, least and greatest."""
        base = self._engines[0]
        rows = []
        for load in self._loads:
            for other in self._engines[1:]:
                cells = [
                    _ratio(ratios(self._values(load, base, name), self._values(load, other, name)))
                    if name in self._metrics[load]
                    else ""
                    for name in self._columns
                ]
                rows.append([f"{base} / {other}", load, *cells])
        return table(
            [
                "ratio",
                "load",
                *(METRICS[name].title.removesuffix(" ms").removesuffix(" MiB") for name in self._columns),
            ],
            rows,
        )

    def values(self) -> str:
        rows = []
        for load in self._loads:
            for engine in self._engines:
                cells = [
                    _value(name, Spread.of(self._values(load, engine, name))) if name in self._metrics[load] else ""
                    for name in self._columns
                ]
                rows.append([engine, load, *cells, self._checks(load, engine), self._ids(load, engine)])
        titles = (METRICS[name].title for name in self._columns)
        return table(["engine", "load", *titles, "wrong answers", "same ids"], rows)

    @property
    def _columns(self) -> list[str]:
        shown = {name for names in self._metrics.values() for name in names}
        return [name for name in METRICS if name in shown]

    def _values(self, load: str, engine: str, name: str) -> list[float]:
        return [result.metrics.get(name, math.nan) for result in self._rounds.get((load, engine), [])]

    def _checks(self, load: str, engine: str) -> str:
        rounds = self._rounds.get((load, engine), [])
        return f"{sum(len(result.faults) for result in rounds)} of {sum(result.requests for result in rounds)}"

    def _ids(self, load: str, engine: str) -> str:
        share = self._same_ids.get((load, engine), math.nan)
        return "" if math.isnan(share) else f"{share:.0%}"


def _ratio(spread: Spread) -> str:
    if math.isnan(spread.median):
        return "-"
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _value(name: str, spread: Spread) -> str:
    if math.isnan(spread.median):
        return "-"
    show = METRICS[name].show
    return f"{show(spread.median)} ({show(spread.low)}-{show(spread.high)})"
