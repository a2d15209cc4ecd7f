"""``/v1/messages``, Anthropic's API, over the machinery of chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.gateway.calls import Call
from services.gateway.chat import Chat
from services.gateway.generation import Answer, Api, Intake
from services.gateway.messages.answer import MessageAnswer
from services.gateway.messages.schema import CountTokensRequest, MessagesRequest
from services.gateway.messages.translate import NAMES, chat_request
from services.gateway.model import Limits
from shared.wire import SubmitText


class Messages(Api[MessagesRequest]):
    """max_tokens has to be given, so programs give the most that any answer may need, whatever the prompt."""

    request_model = MessagesRequest

    def names(self, asked: MessagesRequest) -> Mapping[str, str]:
        return NAMES

    def submits(self, asked: MessagesRequest, limits: Limits, request_id: str, tenant: str) -> list[SubmitText]:
        submits = Chat().submits(chat_request(asked, limits), limits, request_id, tenant)
        return [replace(submit, clamp_max_tokens=True) for submit in submits]

    def answer(self, asked: MessagesRequest, call: Call, model: str) -> Answer:
        return MessageAnswer(asked, call, model)


class MessageCounts(Intake[CountTokensRequest]):
    """The prompts of the same requests, which are counted and not answered."""

    request_model = CountTokensRequest

    def names(self, asked: CountTokensRequest) -> Mapping[str, str]:
        return NAMES

    def submits(self, asked: CountTokensRequest, limits: Limits, request_id: str, tenant: str) -> list[SubmitText]:
        return Chat().submits(chat_request(asked, limits), limits, request_id, tenant)
