"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them, after content."""

from __future__ import annotations

import json

from services.tokenizer.parsers.calls import CallTransducer
from services.tokenizer.parsers.transducer import END, Run
from shared.channels import CONTENT

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(CallTransducer):
    @staticmethod
    def written(name: str, arguments: str) -> str:
        return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'

    def _run(self) -> Run:
        char = yield
        while (yield from self._until(OPEN, CONTENT, char)):
            char = yield from self._space((yield))
            before = self.calls
            char = yield from self._attempt(self._object(char), CLOSE)
            if self.calls > before:
                char = yield from self._close(char)
        self._release(CONTENT)
        return END

    def _close(self, char: str) -> Run:
        """Behind a call; a model may leave the closing marker out."""
        if not self._open.endswith(CLOSE):
            char = yield from self._skip_space(char)
            if not (yield from self._match(CLOSE, char)):
                if self._last == END:
                    self._drop()
                return self._last
        self._drop()
        return (yield from self._skip_space((yield)))
