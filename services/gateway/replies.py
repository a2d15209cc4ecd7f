"""What bodies of answers hold, for the API's description. The code that makes them is tested against these models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


# ---- errors ----


class Error(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    """As OpenAI's. ``param`` is the dotted path of the field at fault, ``code`` a stable word for what is wrong."""

    error: Error


class AnthropicError(Reply):
    type: str
    message: str


class AnthropicErrorReply(Reply):
    type: Literal["error"]
    error: AnthropicError


# ---- chat and text completions ----


class PromptTokensDetails(Reply):
    cached_tokens: int


class CompletionTokensDetails(Reply):
    """Each only where it is looked for."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(Reply):
    """completion_tokens_details: only where there are some."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(Reply):
    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob] | None
    refusal: None


class PromptLogprob(Reply):
    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionCall(Reply):
    name: str
    arguments: str


class ToolCall(Reply):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []
    function_call: FunctionCall | None = None


class Choice(Reply):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "function_call", "abort", "error"] | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_text: str | None = None


class TextLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: None


# ---- responses ----


class AnswerText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputItem(Reply):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputMessage(OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[AnswerText]


class OutputThought(Reply):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(OutputItem):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[OutputThought]
    encrypted_content: None


class OutputFunctionCall(OutputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"]


class ResponseError(Reply):
    code: str
    message: str


class InputDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Reply):
    reasoning_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Reply):
    """Most fields say what was asked; ``store`` is always false, as nothing is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


# ---- messages ----


class AnswerBlock(Reply):
    type: Literal["text"]
    text: str


class ThoughtBlock(Reply):
    type: Literal["thinking"]
    thinking: str
    signature: str


class CallBlock(Reply):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Reply):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock | ThoughtBlock | CallBlock]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Reply):
    input_tokens: int


class InputTokens(TokenCount):
    object: Literal["response.input_tokens"]


# ---- everything else ----


class ModelCard(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Reply):
    prompt: str


class Rendered(Reply):
    """What would be computed: the prompt as text and tokens, and how the answer would be sampled."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    features: None
    stream: bool
    cache_salt: str | None
    priority: int


class Explanation(Reply):
    """What of a prompt is in the prefix cache; ``miss`` is why not more, null when all of it is."""

    prompt_tokens: int
    cached_tokens: int
    block_size: int
    cached_blocks: list[int]
    partial_block: dict[str, int] | None
    miss: dict[str, Any] | None


class State(Reply):
    status: Literal["ok"]


class Unavailable(Reply):
    status: Literal["unavailable"]
    reason: str


class Version(Reply):
    version: str


class Page(BaseModel):
    """A part of what the scheduler tells; the next one's ``cursor`` is ``next_cursor``, null on the last."""

    model_config = ConfigDict(extra="allow")
    next_cursor: int | None = Field(...)
