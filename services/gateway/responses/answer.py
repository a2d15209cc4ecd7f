"""Answers of ``/v1/responses``: items that grow, and the events that tell each change of them.

The whole answer is what a client has at the end of the stream, because both are made by the same steps.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from services.gateway import logprobs
from services.gateway.calls import Call, CallArguments, CallStart, Content, Delta, Part, Reasoning, Request
from services.gateway.generation import Answer
from services.gateway.responses.schema import JsonSchemaFormat, ResponsesRequest
from services.gateway.stream import named_event
from shared.errors import RequestError


class ResponseAnswer(Answer):
    def __init__(self, asked: ResponsesRequest, call: Call, model: str) -> None:
        self.id = f"resp_{call.request_id.removeprefix('resp_')}"
        self._asked, self._call = asked, call
        self._items: list[dict[str, Any]] = []
        self._events: list[bytes] = []
        self._number = 0
        self._finish, self._cut_call = "", False
        self._head = _head(self.id, asked, call, model)

    def whole(self) -> dict[str, Any]:
        [request] = self._call.requests
        if (delta := request.outputs[0].take()) is not None:
            self.piece(0, request, delta)
        self._end()
        return self._response()

    def opening(self) -> list[bytes]:
        for name in ("response.created", "response.in_progress"):
            self._tell(name, response=self._response("in_progress"))
        return self._taken()

    def piece(self, index: int, request: Request, delta: Delta) -> list[bytes]:
        """logprobs come with the first text of the piece, as the tokens of a piece are those of all its parts."""
        told = logprobs.of_chat(delta.logprobs, self._asked.top_logprobs or 0)["content"] if delta.logprobs else []
        for part in delta.parts:
            if isinstance(part, Reasoning) and self._asked.include_reasoning is False:
                continue
            self._grow(part, told)
            if isinstance(part, Content):
                told = []
        if delta.finished is not None:
            self._finish, self._cut_call = delta.finished.reason, delta.cut_call
        return self._taken()

    def failure(self, error: RequestError) -> list[bytes]:
        self._close("incomplete")
        failed = {"code": "server_error", "message": error.message}
        self._tell("response.failed", response={**self._response("failed"), "error": failed})
        return self._taken()

    def ending(self) -> list[bytes]:
        self._end()
        response = self._response()
        self._tell(f"response.{response['status']}", response=response)
        return self._taken()

    # ---- items ----

    def _grow(self, part: Part, told: list[dict[str, Any]]) -> None:
        if isinstance(part, CallStart):
            self._close()
            call = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
            self._open("fc_", call)
        elif isinstance(part, CallArguments):
            item = self._items[-1]
            item["arguments"] += part.text
            self._tell("response.function_call_arguments.delta", **self._at(item), delta=part.text)
        elif isinstance(part, Reasoning):
            item = self._current("reasoning")
            item["content"][0]["text"] += part.text
            self._tell("response.reasoning_text.delta", **self._at(item), content_index=0, delta=part.text)
        else:
            item = self._current("message")
            item["content"][0]["text"] += part.text
            item["content"][0]["logprobs"] += told
            place = {**self._at(item), "content_index": 0}
            self._tell("response.output_text.delta", **place, delta=part.text, logprobs=told)

    def _current(self, kind: str) -> dict[str, Any]:
        """The last item, if it is of that kind and open; else a new one."""
        if not self._items or self._items[-1]["type"] != kind:
            self._close()
            if kind == "message":
                self._open("msg_", {"type": kind, "role": "assistant", "content": []})
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            else:
                self._open("rs_", {"type": kind, "summary": [], "content": [], "encrypted_content": None})
                part = {"type": "reasoning_text", "text": ""}
            item = self._items[-1]
            item["content"].append(part)
            self._tell("response.content_part.added", **self._at(item), content_index=0, part=part)
        return self._items[-1]

    def _open(self, prefix: str, fields: dict[str, Any]) -> None:
        item = {"id": prefix + secrets.token_hex(24), "status": "in_progress", **fields}
        self._items.append(item)
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _close(self, status: str = "completed") -> None:
        """Tells that the last item is whole, or that no more of it will come."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            self._tell("response.function_call_arguments.done", **self._at(item), **told)
        else:
            [part] = item["content"]
            place = {**self._at(item), "content_index": 0}
            if item["type"] == "message":
                text = {"text": part["text"], "logprobs": part["logprobs"]}
                self._tell("response.output_text.done", **place, **text)
            else:
                self._tell("response.reasoning_text.done", **place, text=part["text"])
            self._tell("response.content_part.done", **place, part=part)
        self._tell("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _end(self) -> None:
        """An answer has at least one item, if an empty one."""
        if not self._items:
            self._current("message")
        self._close("incomplete" if self._finish == "length" or self._cut_call else "completed")

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._items) - 1}

    # ---- events ----

    def _tell(self, name: str, /, **fields: Any) -> None:
        if self._asked.stream:
            self._events.append(named_event(name, {"type": name, "sequence_number": self._number, **fields}))
            self._number += 1

    def _taken(self) -> list[bytes]:
        events, self._events = self._events, []
        return events

    def _response(self, status: str = "") -> dict[str, Any]:
        """The response as it is; its end decides the status if none is given."""
        cut = self._finish == "length"
        status = status or ("incomplete" if cut else "completed")
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items,
            "usage": None if status == "in_progress" else _usage(self._call),
        }


def _head(id: str, asked: ResponsesRequest, call: Call, model: str) -> dict[str, Any]:
    """What is the same in every event. Nothing is stored, whatever was asked, so ``store`` is false."""
    sampling = call.requests[0].submit.sampling
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": _format(asked), "verbosity": (asked.text and asked.text.verbosity) or "medium"},
        "tool_choice": _plain(asked.tool_choice or "auto"),
        "tools": [tool.told for tool in asked.tools or []],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": asked.truncation or "disabled",
        "usage": None,
        "user": asked.user,
        "metadata": asked.metadata or {},
    }


def _format(asked: ResponsesRequest) -> dict[str, Any]:
    wanted = asked.text.format if asked.text is not None else None
    if isinstance(wanted, JsonSchemaFormat):
        return wanted.model_dump(by_alias=True)
    return {"type": "text" if wanted is None else wanted.type}


def _usage(call: Call) -> dict[str, Any] | None:
    [request] = call.requests
    if request.done is None:
        return None
    done = request.done
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": done.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": request.reasoning_tokens or 0},
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump()
