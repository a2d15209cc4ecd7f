"""``/v1/responses``, OpenAI's newer API, over the machinery of chats."""

from __future__ import annotations

from services.gateway.calls import Call
from services.gateway.chat import Chat
from services.gateway.generation import Answer, Api
from services.gateway.model import Limits
from services.gateway.responses.answer import ResponseAnswer
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.responses.translate import NAMES, chat_request
from shared.wire import SubmitText


class Responses(Api[ResponsesRequest]):
    request_model = ResponsesRequest
    names = NAMES

    def submits(self, asked: ResponsesRequest, limits: Limits, request_id: str, tenant: str) -> list[SubmitText]:
        return Chat().submits(chat_request(asked, limits), limits, request_id, tenant)

    def answer(self, asked: ResponsesRequest, call: Call, model: str) -> Answer:
        return ResponseAnswer(asked, call, model)
