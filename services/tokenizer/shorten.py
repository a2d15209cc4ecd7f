"""Conversations that are too long for the context, without their oldest turns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any


def without_oldest(messages: list[Any], fits: Callable[[list[Any]], bool]) -> list[Any]:
    """``messages`` without as few of the oldest as make the rest fit; where nothing does, the fewest that can be left.

    System messages always stay. A conversation is cut before a message of the user, as templates that want turns to
    alternate take what is left then; only where the last such turn alone is too long, before one of the assistant in
    it, never between a call and its results. ``fits`` is asked O(log n) times, as less always fits better.
    """
    cuts = _cuts(messages)
    if not cuts:
        return messages
    place = bisect_left(cuts, True, key=lambda cut: fits(_from(messages, cut)))
    return _from(messages, cuts[min(place, len(cuts) - 1)])


def _cuts(messages: list[Any]) -> list[int]:
    """Places behind the conversation's first message, ascending."""
    roles = [message.get("role") for message in messages]
    users = [place for place, role in enumerate(roles) if role == "user"]
    last = users[-1] if users else -1
    later = [place for place, role in enumerate(roles) if role == "assistant" and place > last]
    first = next((place for place, role in enumerate(roles) if role != "system"), len(roles))
    return [place for place in (*users, *later) if place > first]


def _from(messages: list[Any], cut: int) -> list[Any]:
    return [message for message in messages[:cut] if message.get("role") == "system"] + messages[cut:]
