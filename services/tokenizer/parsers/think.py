"""Reasoning: what a model writes between ``<think>`` and ``</think>`` before its answer."""

from __future__ import annotations

from services.tokenizer.parsers.transducer import END, Piece, Run, Transducer
from shared.channels import CONTENT, REASONING

OPEN, CLOSE = "<think>", "</think>"


class ThinkSplitter(Transducer):
    """inside: reasoning has begun already, in the prompt or by the model's habit; a marker may still say so again.

    White space beside the markers is part of them.
    """

    reasoning_end: int | None
    """Characters of the text up to the end of ``</think>``; 0 without reasoning, None while it is not closed."""

    def __init__(self, inside: bool) -> None:
        self._inside, self._plain = inside, False
        self.reasoning_end = None if inside else 0
        super().__init__()

    def feed(self, text: str) -> list[Piece]:
        if self._plain:
            return [(CONTENT, text)] if text else []
        return super().feed(text)

    def _run(self) -> Run:
        char = yield from (self._skip_space((yield)) if self._inside else self._little_space((yield)))
        if (yield from self._match(OPEN, char)):
            self.reasoning_end = None
            self._drop()
            char = yield from self._skip_space((yield))
        elif self._cut and self._begins(OPEN):
            self._drop()
            return END
        elif self._inside:
            char = self._last
        else:
            return (yield from self._rest())
        if not (yield from self._until(CLOSE, REASONING, char)):
            self._release(REASONING)
            return END
        self.reasoning_end = self._seen
        self._drop()
        yield from self._skip_space((yield))
        return (yield from self._rest())

    def _rest(self) -> Run:
        self._plain = True
        while self._last != END:
            self._release(CONTENT)
            yield
        self._release(CONTENT)
        return END
