"""``/v1/responses``, OpenAI's newer API, over the machinery of chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.gateway.calls import Call
from services.gateway.chat import Chat
from services.gateway.generation import Answer, Api
from services.gateway.model import Limits
from services.gateway.responses.answer import ResponseAnswer
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.responses.translate import NAMES, chat_request
from shared.wire import SubmitText, Truncation


class Responses(Api[ResponsesRequest]):
    request_model = ResponsesRequest

    def names(self, asked: ResponsesRequest) -> Mapping[str, str]:
        return NAMES

    def submits(self, asked: ResponsesRequest, limits: Limits, request_id: str, tenant: str) -> list[SubmitText]:
        submits = Chat().submits(chat_request(asked, limits), limits, request_id, tenant)
        if asked.truncation != "auto":
            return submits
        return [replace(submit, truncation=Truncation(side="messages")) for submit in submits]

    def answer(self, asked: ResponsesRequest, call: Call, model: str) -> Answer:
        return ResponseAnswer(asked, call, model)
