"""Tool calls as JSON objects, ``{"name": ..., "arguments": {...}}``, read while they grow.

The name is told once it is complete, and from then on the arguments are told character by character, exactly as the
model writes them. What turns out to be no call before its name is told becomes content, markers included; what breaks
off later stays arguments. So nothing the model wrote is lost, and no answer fails because of it. Only where the text
was cut (``max_tokens``) the beginning of a call without a whole name is not told.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable

from services.tokenizer.parsers.transducer import END, Run, Transducer
from shared.channels import CONTENT, arguments_of, name_of

ARGUMENTS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id", "function", "description")  # that a call may have as well


class Malformed(Exception):
    """The text is no call."""


class CallTransducer(Transducer):
    """names: of the functions that may be called. parallel: False drops every call after the first.

    demanded: the answer is held to calls, so whatever begins one is one.
    """

    def __init__(self, names: Iterable[str], parallel: bool, demanded: bool = False) -> None:
        self.calls = 0
        self._names, self._parallel, self._demanded = frozenset(names), parallel, demanded
        self._named = self._argued = False  # whether the call under way has told its name, its arguments
        super().__init__()

    @staticmethod
    @abstractmethod
    def written(name: str, arguments: str) -> str:
        """A call as models of this format write it; arguments: JSON."""

    def _attempt(self, call: Run, marker: str, *, marked: bool = True) -> Run:
        """Runs ``call``. If it is none, text up to ``marker``, which is left open, is content or stays arguments.

        marked: a marker said that it is one, so that where the text is cut nobody has to guess.
        """
        try:
            return (yield from call)
        except Malformed:
            if not self._named:
                if self._cut and (marked or self._follows_calls or self._names_function()):
                    self._drop()
                self._release(CONTENT, keep=len(self._last))
                return self._last
        self._named = self._settled = False
        channel = CONTENT if self._argued else arguments_of(self.calls - 1)
        if not (yield from self._until(marker, channel, self._last)):
            self._release(channel)
        return self._last

    @property
    def _follows_calls(self) -> bool:
        return self._demanded or self.calls > 0

    def _begins(self, marker: str) -> bool:
        return super()._begins(marker) or (self._follows_calls and marker.startswith(self._open.lstrip()))

    def _names_function(self) -> bool:
        """Whether what is open may be the beginning of a call of a known function, as models write it."""
        begun = "".join(self._open.split())
        calls = (f'{key}"name":"{name}"' for key in ("{", '{"type":"function",') for name in self._names)
        return any(call.startswith(begun) for call in calls)

    def _object(self, char: str, strict: bool = False) -> Run:
        """A call as a JSON object that begins with ``char``.

        strict: nothing but a known function's name and the keys of a call will do, as no marker said it is one.
        """
        if char != "{":
            raise Malformed
        early: list[str] = []
        self._argued = False
        char = yield from self._space((yield))
        while char != "}":
            key = yield from self._string(char, _ignore)
            char = yield from self._space((yield))
            if char != ":":
                raise Malformed
            char = yield from self._space((yield))
            if key == "name" and not self._named:
                name = yield from self._string(char, _ignore)
                if not name or (strict and name not in self._names):
                    raise Malformed
                self._begin(name)
                self._argue("".join(early))
                char = yield
            elif key in ARGUMENTS and not self._argued:
                char = yield from self._arguments(char, self._argue if self._named else early.append)
                self._argued = True
            elif strict and not self._named and key not in OTHER_KEYS:
                raise Malformed
            else:
                char = yield from self._value(char, _ignore)
            char = yield from self._space(char)
            if char == ",":
                char = yield from self._space((yield))
            elif char != "}":
                raise Malformed
        if not self._named:
            raise Malformed
        if not self._argued:
            self._argue("{}")
        return (yield from self._end())

    def _begin(self, name: str) -> None:
        self._drop()
        self._named = self._settled = True
        self._tell(name_of(self.calls), name)
        self.calls += 1

    def _end(self) -> Run:
        """Behind a call's last character."""
        self._drop()
        self._named = self._settled = False
        return (yield)

    def _arguments(self, char: str, tell: Callable[[str], None]) -> Run:
        """An object goes as it grows; JSON in a string is unwrapped, and null is no arguments."""
        if char == "{":
            return (yield from self._value(char, tell))
        settled, self._settled = self._settled, False
        if char == '"':
            tell((yield from self._string(char, _ignore)))
            char = yield
        else:
            parts: list[str] = []
            char = yield from self._value(char, parts.append)
            text = "".join(parts)
            tell("{}" if text == "null" else text)
        self._settled = settled
        return char

    def _argue(self, text: str) -> None:
        self._tell(arguments_of(self.calls - 1), text)

    def _tell(self, channel: int, text: str) -> None:
        if self._parallel or channel <= arguments_of(0):
            super()._tell(channel, text)

    # ---- JSON ----

    def _value(self, char: str, tell: Callable[[str], None]) -> Run:
        """Any JSON value, told as it grows; only brackets, strings and where it ends are looked at."""
        depth = 0
        bare = char not in ("{", "[", '"')
        while True:
            if char == '"':
                yield from self._string(char, tell)
            elif char in ("", "<"):  # the end, or a marker: no JSON has it outside of strings
                raise Malformed
            elif depth == 0 and bare and (char in ",]}" or char.isspace()):
                return char
            else:
                depth += (char in "{[") - (char in "}]")
                tell(char)
            if depth <= 0 and not bare:
                return (yield)
            char = yield

    def _string(self, char: str, tell: Callable[[str], None]) -> Generator[None, str, str]:
        """A JSON string that begins with ``char``, decoded; told as it is spelled."""
        if char != '"':
            raise Malformed
        spelled, escaped = [char], False
        tell(char)
        while escaped or char != '"' or len(spelled) == 1:
            escaped = char == "\\" and not escaped
            char = yield
            if char == END:
                raise Malformed
            spelled.append(char)
            tell(char)
        try:
            return str(json.loads("".join(spelled), strict=False))
        except ValueError:
            return "".join(spelled[1:-1])


def _ignore(text: str) -> None:
    pass
