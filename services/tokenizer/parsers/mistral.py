"""Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call.

The second form may have ``[CALL_ID]...`` before its ``[ARGS]``, and the marker may be missing altogether.
"""

from __future__ import annotations

import json
from collections.abc import Generator

from services.tokenizer.parsers.calls import CallTransducer, Malformed
from services.tokenizer.parsers.transducer import END, Run
from shared.channels import CONTENT

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(CallTransducer):
    @staticmethod
    def written(name: str, arguments: str) -> str:
        return f'{OPEN}[{{"name": {json.dumps(name)}, "arguments": {arguments}}}]'

    def _run(self) -> Run:
        char = yield
        while (yield from self._until(OPEN, CONTENT, char)):
            char = yield from self._space((yield))
            if char == "[":
                char = yield from self._array()
            else:
                char = yield from self._attempt(self._named_call(char), OPEN)
        self._release(CONTENT)
        return END

    def _array(self) -> Run:
        while True:
            char = yield from self._space((yield))
            before = self.calls
            char = yield from self._attempt(self._object(char), OPEN)
            if self.calls == before or self._open.endswith(OPEN):
                return char
            char = yield from self._skip_space(char)
            if char == "]":
                self._drop()
                return (yield from self._skip_space((yield)))
            if char != ",":
                return char

    def _named_call(self, char: str) -> Run:
        name = ""
        while char.isalnum() or char in ("_", "-", "."):
            name += char
            char = yield
        if not name:
            raise Malformed
        if char == "[":
            char = yield from self._tags()
        char = yield from self._space(char)
        if char != "{":
            raise Malformed
        self._argued = False
        self._begin(name)
        char = yield from self._value(char, self._argue)
        self._named = self._settled = False
        return (yield from self._skip_space(char))

    def _tags(self) -> Run:
        tag = yield from self._tag()
        if tag == CALL_ID:  # the model's own id; clients get one from the gateway
            char = yield
            while char.isalnum() or char in ("_", "-"):
                char = yield
            if char != "[":
                raise Malformed
            tag = yield from self._tag()
        if tag != ARGS:
            raise Malformed
        return (yield)

    def _tag(self) -> Generator[None, str, str]:
        """From an opening bracket on."""
        tag = "["
        while not tag.endswith("]"):
            char = yield
            if not (char.isupper() or char in ("_", "]")) or len(tag) == len(CALL_ID):
                raise Malformed
            tag += char
        return tag
