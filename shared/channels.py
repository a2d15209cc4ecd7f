"""Which part of an answer a piece of text belongs to, as a small number on the wire.

A tool call is two channels: its function's name, which comes as one piece and opens the call, and its arguments. So
calls need no messages of their own, and what holds for text (offsets, RESUME) holds for them.
"""

from __future__ import annotations

CONTENT = 0
REASONING = 1


def name_of(call: int) -> int:
    """The channel of the name of tool call number ``call``, from 0."""
    return 2 + 2 * call


def arguments_of(call: int) -> int:
    """The channel of its arguments, JSON text."""
    return 3 + 2 * call


def call_of(channel: int) -> int | None:
    """The tool call that a channel belongs to; None for content and reasoning."""
    return (channel - 2) // 2 if channel >= 2 else None


def opens_call(channel: int) -> bool:
    return channel >= 2 and channel % 2 == 0
