"""Llama 3: the whole answer is ``{"name": ..., "parameters": {...}}``, or more of them after semicolons.

``<|python_tag|>`` may stand before it, and then content too. Without it only a known function makes an object a call,
because an answer may be JSON of its own.
"""

from __future__ import annotations

import json

from services.tokenizer.parsers.calls import CallTransducer
from services.tokenizer.parsers.transducer import END, Run
from shared.channels import CONTENT

PYTHON_TAG = "<|python_tag|>"


class Llama3(CallTransducer):
    @staticmethod
    def written(name: str, arguments: str) -> str:
        return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'

    def _run(self) -> Run:
        char = yield from self._little_space((yield))
        if char == "{":
            char = yield from self._series(char, strict=True)
        while (yield from self._until(PYTHON_TAG, CONTENT, char)):
            char = yield from self._space((yield))
            char = yield from self._series(char, strict=False)
        self._release(CONTENT)
        return END

    def _series(self, char: str, strict: bool) -> Run:
        while True:
            before = self.calls
            char = yield from self._attempt(self._object(char, strict), PYTHON_TAG, marked=not strict)
            if self.calls == before:
                return char
            char = yield from self._skip_space(char)
            if char != ";":
                return char
            char = yield from self._space((yield))
            if char == END:
                self._drop()
            if char != "{":
                return char
