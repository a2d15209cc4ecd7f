"""Every field that programs for OpenAI's, Anthropic's and vLLM's servers may send is known here."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import anthropic.resources.beta.messages as beta
import pytest
from anthropic import types as anthropic_types
from anthropic.resources.messages import Messages
from openai.resources.chat.completions import Completions as Chats
from openai.resources.completions import Completions
from openai.resources.responses import Responses
from openai.resources.responses.input_tokens import InputTokens
from openai.types import chat as chat_types
from openai.types import responses as response_types
from openai.types.chat import ParsedChatCompletionMessage

from services.gateway.chat_schema import ChatRequest
from services.gateway.conversation import Message
from services.gateway.fields import drop_without_effect
from services.gateway.messages.schema import (
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.gateway.model import Body, Limits, Model
from services.gateway.prompt_schemas import DetokenizeRequest, TokenizeRequest
from services.gateway.replies import ChatMessage
from services.gateway.responses.schema import FunctionCallItem, FunctionTool, ResponsePart, ResponsesRequest
from services.gateway.schemas import CompletionRequest, validate
from services.gateway.tools import Function
from shared.errors import RequestError

LIMITS = Limits(vocab_size=100, max_model_len=512)
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "betas"}


@pytest.mark.parametrize(
    ("method", "model"),
    [
        (Chats.create, ChatRequest),
        (Completions.create, CompletionRequest),
        (Responses.create, ResponsesRequest),
        (InputTokens.count, ResponsesRequest),
        (Messages.create, MessagesRequest),
        (Messages.count_tokens, CountTokensRequest),
        (beta.Messages.create, MessagesRequest),
        (beta.Messages.count_tokens, CountTokensRequest),
    ],
    ids=lambda one: getattr(one, "__qualname__", ""),
)
def test_their_own_clients_have_no_field_that_is_not_known(method: Any, model: type[Body]) -> None:
    """Each is honoured, has no effect or is refused with a reason; null never asks for anything."""
    names = inspect.signature(method).parameters.keys() - OF_THE_CLIENT
    drop_without_effect(dict.fromkeys(names), model.model_fields, model.without_effect, model.only_at)


@pytest.mark.parametrize(
    ("sent", "model"),
    [
        (chat_types.ChatCompletionSystemMessageParam, Message),
        (chat_types.ChatCompletionUserMessageParam, Message),
        (chat_types.ChatCompletionAssistantMessageParam, Message),
        (chat_types.ChatCompletionToolMessageParam, Message),
        (chat_types.ChatCompletionFunctionMessageParam, Message),
        (chat_types.completion_create_params.Function, Function),
        (response_types.FunctionToolParam, FunctionTool),
        (response_types.ResponseFunctionToolCallParam, FunctionCallItem),
        (response_types.ResponseInputTextParam, ResponsePart),
        (response_types.ResponseOutputTextParam, ResponsePart),
        (anthropic_types.TextBlockParam, TextBlock),
        (anthropic_types.ThinkingBlockParam, ThinkingBlock),
        (anthropic_types.ToolParam, CustomTool),
        (anthropic_types.ToolResultBlockParam, ToolResultBlock),
        (anthropic_types.ToolUseBlockParam, ToolUseBlock),
    ],
    ids=lambda one: one.__name__,
)
def test_nor_have_the_objects_in_them(sent: Any, model: type[Model]) -> None:
    assert get_type_hints(sent).keys() <= model.model_fields.keys() | {
        field.alias for field in model.model_fields.values()
    }


def test_an_answers_message_can_be_sent_back() -> None:
    """As it came, and as OpenAI's client has it."""
    assert ChatMessage.model_fields.keys() <= Message.model_fields.keys()
    assert ParsedChatCompletionMessage.model_fields.keys() <= Message.model_fields.keys()


# What vLLM 0.32's server takes for fields that are left out, so a program may as well send it.
SAMPLED: dict[str, Any] = {
    **dict.fromkeys(("frequency_penalty", "logit_bias", "min_p", "presence_penalty", "repetition_penalty", "seed")),
    **dict.fromkeys(("structured_outputs", "temperature", "top_k", "top_p", "user", "watermarking", "cache_salt")),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "session_id", "return_mm_kwargs")),
    "stop": [],
    "stop_token_ids": [],
    "stream": False,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "priority": 0,
    "request_id": "8b0e",
    "mm_payload": "tensors",
}
GENERATION: dict[str, Any] = {
    **SAMPLED,
    **dict.fromkeys(("stream_options", "prompt_logprobs", "truncate_prompt_tokens", "truncation_side")),
    **dict.fromkeys(("logprob_token_ids", "allowed_token_ids", "response_format", "return_tokens_as_token_ids")),
    **dict.fromkeys(("return_token_ids", "repetition_detection", "thinking_token_budget", "stream_interval")),
    "n": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "min_tokens": 0,
    "bad_words": [],
    "echo": False,
    "spaces_between_special_tokens": True,
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
}
RENDERED: dict[str, Any] = dict.fromkeys(
    ("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "tools")
)
HI = [{"role": "user", "content": "Hi"}]
VLLM: list[tuple[type[Body], dict[str, Any]]] = [
    (
        ChatRequest,
        {
            **GENERATION,
            **RENDERED,
            **dict.fromkeys(("max_tokens", "max_completion_tokens", "reasoning_effort", "documents")),
            "messages": HI,
            "logprobs": False,
            "top_logprobs": 0,
            "tool_choice": "none",
            "include_reasoning": True,
            "parallel_tool_calls": True,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "return_prompt_text": None,
        },
    ),
    (
        CompletionRequest,
        {
            **GENERATION,
            "prompt": "a",
            "logprobs": None,
            "max_tokens": 16,
            "suffix": None,
            "prompt_embeds": None,
            "add_special_tokens": True,
        },
    ),
    (
        ResponsesRequest,
        {
            **SAMPLED,
            **dict.fromkeys(("include", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "prompt")),
            **dict.fromkeys(("previous_response_id", "reasoning", "text", "prompt_cache_key", "media_io_kwargs")),
            **dict.fromkeys(("mm_processor_kwargs", "previous_input_messages", "chat_template_kwargs")),
            "input": "Hi",
            "background": False,
            "parallel_tool_calls": True,
            "include_reasoning": True,
            "tools": [],
            "service_tier": "auto",
            "store": True,
            "tool_choice": "auto",
            "top_logprobs": 0,
            "truncation": "disabled",
            "enable_response_messages": False,
        },
    ),
    (
        MessagesRequest,
        {
            **dict.fromkeys(("metadata", "output_config", "thinking", "stop_sequences", "system", "temperature")),
            **dict.fromkeys(("tool_choice", "tools", "top_k", "top_p", "return_mm_kwargs", "cache_salt")),
            **dict.fromkeys(("watermarking", "kv_transfer_params", "ec_transfer_params", "vllm_xargs")),
            "messages": HI,
            "max_tokens": 5,
            "stream": False,
            "mm_payload": "tensors",
            "chat_template_kwargs": None,
        },
    ),
    (TokenizeRequest, {"prompt": "a", "add_special_tokens": True, "return_token_strs": False}),
    (
        TokenizeRequest,
        {
            **RENDERED,
            "messages": HI,
            "add_generation_prompt": True,
            "return_token_strs": False,
            "continue_final_message": False,
            "add_special_tokens": False,
        },
    ),
    (DetokenizeRequest, {"tokens": [1]}),
]


@pytest.mark.parametrize(("model", "body"), VLLM, ids=[model.__name__ for model, _ in VLLM])
def test_vllms_fields_are_taken_at_its_defaults_and_null(model: type[Body], body: dict[str, Any]) -> None:
    needed = {"messages", "prompt", "input", "tokens", "max_tokens"}
    for sent in (body, {name: value if name in needed else None for name, value in body.items()}):
        asked = validate(model, sent, LIMITS)
        if hasattr(asked, "check"):
            asked.check()


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (ChatRequest, {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs: {'a': 1} is not supported: this server"),
        (ChatRequest, {"audio": {"voice": "x"}}, "takes text only; leave it out or give null"),
        (ChatRequest, {"thinking_token_budget": 5}, "thinking_token_budget: 5 is not supported: how long it thinks"),
        (ChatRequest, {"kv_transfer_params": {"a": 1}}, "KV memory is not moved between servers"),
        (ChatRequest, {"request_id": "a b"}, "request_id: should be 1 to 128 visible ASCII characters, got 'a b'"),
        (ChatRequest, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: should be -1 or an integer from 1 to"),
        (ChatRequest, {"truncate_prompt_tokens": 513}, "the model's context of 512 tokens, got 513"),
        (ChatRequest, {"truncate_prompt_tokens": True}, "got True"),
        (ChatRequest, {"truncation_side": "middle"}, "truncation_side: Input should be 'left' or 'right'"),
        (ChatRequest, {"stream_interval": 0}, "stream_interval: Input should be greater than or equal to 1"),
        (ChatRequest, {"prediction": {"type": "content"}}, "prediction.content: this field is required"),
        (ChatRequest, {"prediction": {"type": "x", "content": ""}}, "prediction.type: "),
        (
            ChatRequest,
            {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "tools.0: type 'custom' is not supported: calls have arguments in JSON; give a function with one string",
        ),
        (CompletionRequest, {"functions": [{"name": "f"}]}, "functions: .* it is a field of chats"),
        (CompletionRequest, {"prediction": {}}, "prediction: {} is not supported: it is a field of chats"),
        (ResponsesRequest, {"tools": [{"type": "custom", "name": "x"}]}, "tools.0: type 'custom' .*: calls have"),
        (ResponsesRequest, {"background_options": {}}, "answers while the client waits"),
        (ResponsesRequest, {"truncation": "middle"}, "truncation: Input should be 'auto' or 'disabled'"),
        (ResponsesRequest, {"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "defer_loading: is"),
        (MessagesRequest, {"mcp_servers": [{"url": "x"}]}, "mcp_servers: .* this server runs no tools itself"),
        (MessagesRequest, {"container": "x"}, "container: 'x' is not supported: this server runs no tools itself"),
        (MessagesRequest, {"metadata": 5}, "metadata: should be of type object, got 5"),
        (MessagesRequest, {"context_management": {"edits": [{"type": "compact_20260112"}]}}, "as they are sent"),
        (TokenizeRequest, {"media_io_kwargs": {"image": {}}}, "this server takes text only"),
    ],
)
def test_what_is_refused_says_why(model: type[Body], body: dict[str, Any], message: str) -> None:
    least = {"prompt": "a", "messages": HI, "input": "Hi", "max_tokens": 5}
    given = {name: value for name, value in least.items() if name in model.model_fields}
    with pytest.raises(RequestError, match=message) as caught:
        validate(model, {**given, **body}, LIMITS)
    assert caught.value.status == 400 and caught.value.param and caught.value.param.split(".")[0] in body


def test_what_asks_for_nothing_is_taken() -> None:
    for model, body in (
        (MessagesRequest, {"mcp_servers": [], "container": None, "service_tier": "standard_only", "speed": "standard"}),
        (MessagesRequest, {"metadata": {"user_id": "me", "team": 5}, "thinking": {"type": "disabled"}}),
        (MessagesRequest, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
        ),
        (ChatRequest, {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]}),
        (ChatRequest, {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]}}),
        (ResponsesRequest, {"reasoning": {"context": "auto", "mode": "standard"}, "context_management": []}),
    ):
        least = {"prompt": "a", "messages": HI, "input": "Hi", "max_tokens": 5}
        given = {name: value for name, value in least.items() if name in model.model_fields}
        validate(model, {**given, **body}, LIMITS).check()
