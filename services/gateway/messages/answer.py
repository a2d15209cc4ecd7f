"""Answers of ``/v1/messages``: content blocks that grow, and the events that tell each change of them."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from services.gateway.calls import Call, CallArguments, CallStart, Content, Delta, Part, Request
from services.gateway.errors import anthropic_error_body
from services.gateway.generation import Answer
from services.gateway.messages.schema import MessagesRequest
from services.gateway.stream import named_event
from shared.errors import RequestError
from shared.wire import Finished


class MessageAnswer(Answer):
    def __init__(self, asked: MessagesRequest, call: Call, model: str) -> None:
        self.id = f"msg_{call.request_id}"
        self._asked, self._call, self._model = asked, call, model
        self._blocks: list[dict[str, Any]] = []
        self._arguments: dict[int, str] = {}  # the JSON texts of tool inputs, by block
        self._open = self._started = False
        self._finished: Finished | None = None
        self._called = False
        self._events: list[bytes] = []

    def whole(self) -> dict[str, Any]:
        [request] = self._call.requests
        if (delta := request.outputs[0].take()) is not None:
            self.piece(0, request, delta)
        self._end()
        for index, text in self._arguments.items():
            self._blocks[index]["input"] = _parsed(text)
        return self._message(self._blocks, self._stop(), self._usage())

    def opening(self) -> list[bytes]:
        """Nothing: ``message_start`` tells how much of the prompt was cached, which is known from the first text on."""
        return []

    def piece(self, index: int, request: Request, delta: Delta) -> list[bytes]:
        self._start()
        for part in delta.parts:
            self._grow(part)
        if delta.finished is not None:
            self._finished, self._called = delta.finished, delta.called
        return self._taken()

    def failure(self, error: RequestError) -> list[bytes]:
        self._start()
        return [*self._taken(), named_event("error", anthropic_error_body(error))]

    def ending(self) -> list[bytes]:
        self._end()
        self._tell("message_delta", delta=self._stop(), usage=self._usage())
        self._tell("message_stop")
        return self._taken()

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        request, none = self._call.requests[0], {"stop_reason": None, "stop_sequence": None}
        usage = _usage(request.prompt_tokens, request.cached_tokens, 0)
        self._tell("message_start", message=self._message([], none, usage))
        self._tell("ping")

    # ---- blocks ----

    def _grow(self, part: Part) -> None:
        if isinstance(part, CallStart):
            self._close()
            tool = {"type": "tool_use", "id": part.id.replace("call_", "toolu_", 1), "name": part.name, "input": {}}
            self._begin(tool)
            self._arguments[len(self._blocks) - 1] = ""
        elif isinstance(part, CallArguments):
            self._arguments[len(self._blocks) - 1] += part.text
            self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Content):
            self._current({"type": "text", "text": ""})["text"] += part.text
            self._delta({"type": "text_delta", "text": part.text})
        else:
            self._current({"type": "thinking", "thinking": "", "signature": ""})["thinking"] += part.text
            self._delta({"type": "thinking_delta", "thinking": part.text})

    def _current(self, empty: dict[str, Any]) -> dict[str, Any]:
        """The last block, if it is of the kind of ``empty``; else that as a new one."""
        if not self._open or self._blocks[-1]["type"] != empty["type"]:
            self._close()
            self._begin(empty)
        return self._blocks[-1]

    def _begin(self, block: dict[str, Any]) -> None:
        self._open = True
        self._blocks.append(block)
        self._tell("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> None:
        self._tell("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._tell("content_block_stop", index=len(self._blocks) - 1)

    def _end(self) -> None:
        """An answer has at least one block, if an empty one."""
        self._start()
        if not self._blocks:
            self._begin({"type": "text", "text": ""})
        self._close()

    # ---- the message ----

    def _stop(self) -> dict[str, Any]:
        finished = self._finished
        sequence = finished.stop_reason if finished is not None else ""
        if finished is not None and finished.reason == "length":
            reason = "max_tokens" if finished.tokens >= self._asked.max_tokens else "model_context_window_exceeded"
            return {"stop_reason": reason, "stop_sequence": None}
        if sequence and sequence in (self._asked.stop_sequences or []):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": "tool_use" if self._called else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        done = self._call.requests[0].done
        return _usage(done.prompt_tokens, done.cached_tokens, done.completion_tokens) if done else _usage(0, 0, 0)

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop,
            "usage": usage,
        }

    def _tell(self, name: str, /, **fields: Any) -> None:
        if self._asked.stream:
            self._events.append(named_event(name, {"type": name, **fields}))

    def _taken(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


def _usage(prompt: int, cached: int, output: int) -> dict[str, Any]:
    """Anthropic counts a prompt's cached tokens beside its ``input_tokens``, not among them."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _parsed(arguments: str) -> dict[str, Any]:
    """An input is an object, whatever the model wrote: of one that was cut, what is whole, as Anthropic's client reads
    a stream that ends early; what is no object comes under the name of ``arguments``."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": arguments}
