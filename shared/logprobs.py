"""Logprobs between the columns that they travel in and the tokens that they are about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shared.wire import Logprobs

Found = tuple[float, int, list[int], list[float]]
"""Of one token: its logprob and rank, and the likeliest tokens with theirs."""


def by_entry(found: Logprobs) -> Iterator[tuple[int, Found]]:
    """Each entry with what it tells."""
    start = 0
    for entry, sampled, rank, count in zip(found.entries, found.sampled, found.ranks, found.top_counts, strict=True):
        end = start + count
        yield entry, (sampled, rank, found.top_ids[start:end], found.top[start:end])
        start = end


def columns(tokens: Iterable[tuple[int, Found]]) -> Logprobs:
    """The reverse of ``by_entry``."""
    found = Logprobs([], [], [], [], [], [])
    for entry, (sampled, rank, top_ids, top) in tokens:
        found.entries.append(entry)
        found.sampled.append(sampled)
        found.ranks.append(rank)
        found.top_counts.append(len(top_ids))
        found.top_ids.extend(top_ids)
        found.top.extend(top)
    return found
