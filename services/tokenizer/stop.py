"""Stop strings in a growing text.

Each string is an automaton (Knuth, Morris and Pratt 1977) fed character by character, so the first match to *end*
wins, however the text was cut into tokens; of matches that end together the longest wins. Its state is the length of
the longest text suffix that is a prefix of the string: just what must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """``string`` was found; it is characters [start, end) of the text."""

    string: str
    start: int
    end: int


class StopStrings:
    """The stop strings of a request with their failure tables, shared by its sequences. None may be empty."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = sorted(set(strings), key=len, reverse=True)
        self.tables = [_failures(string) for string in self.strings]


class StopMatcher:
    """The state of one sequence."""

    def __init__(self, stops: StopStrings) -> None:
        self._strings, self._tables = stops.strings, stops.tables
        self._states = [0] * len(self._strings)
        self._length = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the start of a stop string."""
        return max(self._states, default=0)

    def skip(self, length: int) -> None:
        """So many characters come in which no stop string may begin."""
        self._length += length

    def feed(self, text: str) -> Match | None:
        """Takes the next characters; the first match, after which nothing more may be fed."""
        for character in text:
            self._length += 1
            for i, string in enumerate(self._strings):
                state, table = self._states[i], self._tables[i]
                while state and string[state] != character:
                    state = table[state - 1]
                if string[state] == character:
                    state += 1
                self._states[i] = state
                if state == len(string):
                    return Match(string, self._length - state, self._length)
        return None


def _failures(string: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = table[length - 1]
        if string[i] == string[length]:
            length += 1
        table[i] = length
    return table
