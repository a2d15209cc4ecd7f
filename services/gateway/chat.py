"""Shapes of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway import logprobs
from services.gateway.calls import CallStart, Content, Delta, Part, Reasoning, Request
from services.gateway.chat_schema import FUNCTIONS, ChatRequest
from services.gateway.conversation import plain
from services.gateway.generation import Shape, finish_of
from services.gateway.model import Limits
from shared.wire import SubmitText


class Chat(Shape[ChatRequest]):
    request_model = ChatRequest
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def names(self, asked: ChatRequest) -> Mapping[str, str]:
        return FUNCTIONS if asked.functions else {}

    def submits(self, asked: ChatRequest, limits: Limits, request_id: str, tenant: str) -> list[SubmitText]:
        submit = self.common(asked, limits, request_id, tenant, "chat", add_special_tokens=False)
        return [
            submit(
                messages=plain(asked.messages),
                template_kwargs=asked.template_variables,
                tools=asked.tool_use,
                chat_template=asked.chat_template or "",
            )
        ]

    def envelope(self, asked: ChatRequest, requests: list[Request]) -> dict[str, Any]:
        extra: dict[str, Any] = {"prompt_token_ids": requests[0].prompt_ids} if asked.return_token_ids else {}
        if asked.prompt_logprobs is not None:
            extra["prompt_logprobs"] = logprobs.of_prompt(requests[0].prompt_logprobs, asked.prompt_logprobs)
        if asked.wants_prompt_text:
            extra["prompt_text"] = requests[0].prompt
        return extra

    def opening(self, asked: ChatRequest, request: Request) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": asked.echoed}, "logprobs": None, "finish_reason": None}

    def pieces(self, asked: ChatRequest, request: Request, delta: Delta) -> list[dict[str, Any]]:
        """One choice for each part, because clients take one entry of a call from a chunk; the last tells the rest."""
        shown = (part for part in delta.parts if asked.shows_reasoning or not isinstance(part, Reasoning))
        deltas = [_delta_of(part, as_function=bool(asked.functions)) for part in shown]
        ids = {"token_ids": delta.ids} if asked.return_token_ids else {}
        told = self._logprobs(asked, delta) if delta.logprobs else None
        if not deltas:
            if delta.finished is None and not ids and told is None:
                return []
            deltas.append({} if delta.finished is not None else {"content": ""})
        choices = [{"delta": one, "logprobs": None, "finish_reason": None} for one in deltas[:-1]]
        last = {"delta": deltas[-1], "logprobs": told, **self._finish(asked, delta), **ids}
        return [*choices, last]

    def whole(self, asked: ChatRequest, request: Request, delta: Delta) -> dict[str, Any]:
        ids = {"token_ids": delta.ids} if asked.return_token_ids else {}
        calls = delta.tool_calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": asked.echoed + delta.text or (None if calls else ""),
            "refusal": None,
        }
        if delta.reasoning and asked.shows_reasoning:
            message |= _reasoning(delta.reasoning)
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        if functions and asked.functions:
            message["function_call"] = functions[0]
        elif functions:
            pairs = zip(calls, functions, strict=True)
            message["tool_calls"] = [{"id": call.id, "type": "function", "function": told} for call, told in pairs]
        return {"message": message, "logprobs": self._logprobs(asked, delta), **self._finish(asked, delta), **ids}

    def _finish(self, asked: ChatRequest, delta: Delta) -> dict[str, Any]:
        """OpenAI says ``stop`` where the client itself named the function to call."""
        finish = finish_of(asked, delta)
        if not delta.called or asked.named_function:
            return finish
        return {**finish, "finish_reason": "function_call" if asked.functions else "tool_calls"}

    def _logprobs(self, asked: ChatRequest, delta: Delta) -> dict[str, Any] | None:
        if asked.output_logprobs < 0:
            return None
        as_ids = bool(asked.return_tokens_as_token_ids)
        return logprobs.of_chat(delta.logprobs, asked.output_logprobs, as_ids=as_ids)


def _delta_of(part: Part, *, as_function: bool) -> dict[str, Any]:
    """as_function: a call is told in OpenAI's older form, which knows one and has no id."""
    if isinstance(part, Content):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return _reasoning(part.text)
    if isinstance(part, CallStart):
        function = {"name": part.name, "arguments": ""}
        if as_function:
            return {"function_call": function}
        return {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]}
    if as_function:
        return {"function_call": {"arguments": part.text}}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _reasoning(text: str) -> dict[str, Any]:
    """vLLM's newer name for it, and the one that most clients know."""
    return {"reasoning": text, "reasoning_content": text}
