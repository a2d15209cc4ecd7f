"""The API's description: made of the models that check requests, and of those that answers keep to."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway import replies
from services.gateway.chat_schema import ChatRequest
from services.gateway.fields import JSON_NAMES
from services.gateway.messages.schema import CountTokensRequest, MessagesRequest
from services.gateway.model import Body
from services.gateway.prompt_schemas import DetokenizeRequest, ExplainRequest, TokenizeRequest
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.schemas import CompletionRequest

REFS = "#/components/schemas/{model}"
STATUSES = {
    400: "What the request asks for cannot be; the error names the field, its value and the limit.",
    401: "The API key is missing or wrong.",
    404: "The model, or what the path names, does not exist here.",
    405: "The path takes other methods.",
    408: "The body did not come in time.",
    413: "The body is larger than --max-body-bytes.",
    429: "Too many requests wait; Retry-After says when to try again.",
    431: "The request's headers are too long.",
    500: "An error of the server's; its log has the details.",
    503: "Not ready, or the request could not be served in time.",
}
ALWAYS = (401, 405, 431, 500)
WITH_BODY = (400, 404, 408, 413, 503)
JSON = "application/json"
EVENTS = "text/event-stream"
EVENT = {
    "type": "object",
    "description": "Each server-sent event, when stream is true.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "contentMediaType": JSON}},
    "required": ["data"],
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. many: the answer is a list of ``answer``. None: it is text (``media``)."""

    method: Literal["get", "post"]
    path: str
    tag: str
    summary: str
    answer: type[BaseModel] | None
    request: type[Body] | None = None
    streams: bool = False
    many: bool = False
    statuses: tuple[int, ...] = ()
    error: type[BaseModel] = replies.ErrorReply
    unavailable: type[BaseModel] = replies.ErrorReply  # the body of a 503
    media: str = JSON
    paged: bool = False


def _post(path: str, tag: str, summary: str, request: type[Body], answer: type[BaseModel], **more: Any) -> Operation:
    statuses = (*WITH_BODY, *more.pop("statuses", ()))
    return Operation("post", path, tag, summary, answer, request, statuses=statuses, **more)


def _generate(path: str, summary: str, request: type[Body], answer: type[BaseModel], **more: Any) -> Operation:
    return _post(path, "Generation", summary, request, answer, streams=True, statuses=(429,), **more)


def _state(path: str, summary: str) -> Operation:
    unavailable = replies.Unavailable
    return Operation("get", path, "State", summary, replies.State, statuses=(503,), unavailable=unavailable)


_ANTHROPIC = {"error": replies.AnthropicErrorReply}

OPERATIONS = (
    _generate("/v1/chat/completions", "Answer a conversation", ChatRequest, replies.ChatCompletion),
    _generate("/v1/completions", "Continue texts", CompletionRequest, replies.Completion),
    _generate("/v1/responses", "Answer in items (OpenAI's newer API)", ResponsesRequest, replies.Response),
    _generate(
        "/v1/messages",
        "Answer a conversation (Anthropic's API)",
        MessagesRequest,
        replies.AnthropicMessage,
        **_ANTHROPIC,
    ),
    _post(
        "/v1/messages/count_tokens",
        "Prompts",
        "How many tokens a conversation is (Anthropic's API)",
        CountTokensRequest,
        replies.TokenCount,
        **_ANTHROPIC,
    ),
    _post(
        "/v1/responses/input_tokens",
        "Prompts",
        "How many tokens a response's input is",
        ResponsesRequest,
        replies.InputTokens,
    ),
    _post("/v1/chat/completions/render", "Prompts", "A conversation's prompt", ChatRequest, replies.Rendered),
    _post(
        "/v1/completions/render",
        "Prompts",
        "Prompts as they would be computed",
        CompletionRequest,
        replies.Rendered,
        many=True,
    ),
    _post("/tokenize", "Prompts", "A prompt's tokens", TokenizeRequest, replies.Tokens),
    _post("/detokenize", "Prompts", "The text of tokens", DetokenizeRequest, replies.Detokenized),
    Operation("get", "/v1/models", "Models", "What is served", replies.ModelList, statuses=(503,)),
    Operation("get", "/v1/models/{name}", "Models", "One of the names", replies.ModelCard, statuses=(404, 503)),
    _state("/health", "Whether the server lives"),
    _state("/ping", "The same, as some clouds ask"),
    _state("/ready", "Whether a request would be served now"),
    Operation("get", "/version", "State", "Quire's version", replies.Version),
    Operation("get", "/metrics", "State", "Numbers for Prometheus", None, media="text/plain"),
    Operation(
        "get", "/internal/blocks", "Internal", "Who owns each block", replies.Page, paged=True, statuses=(400, 503)
    ),
    Operation(
        "get", "/internal/status", "Internal", "The scheduler's view", replies.Page, paged=True, statuses=(400, 503)
    ),
    _post("/internal/explain", "Internal", "Why a prompt is cached or not", ExplainRequest, replies.Explanation),
)


def document() -> dict[str, Any]:
    """The whole description, as OpenAPI 3.1."""
    requests = [(one.request, "validation") for one in OPERATIONS if one.request is not None]
    bodies = [body for one in OPERATIONS for body in (one.answer, one.error, one.unavailable) if body is not None]
    models: Any = dict.fromkeys([*requests, *((body, "serialization") for body in bodies)])
    refs, schemas = models_json_schema(list(models), ref_template=REFS)
    for request, _ in requests:
        schema = schemas["$defs"][request.__name__]
        schema["properties"] = {**_without_effect(request), **schema["properties"]}
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": version("quire-serving"),
            "description": "Serves language models from paged KV memory, over OpenAI's and Anthropic's APIs.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _without_effect(request: type[Body]) -> dict[str, Any]:
    """Fields that are taken and have no effect, or only at the values that ask for nothing."""
    effectless = {
        name: {"type": [JSON_NAMES[kind], "null"], "description": "Has no effect."}
        for name, kind in request.without_effect.items()
    }
    refused = {
        name: {"enum": [*rule.values, None], "description": f"Nothing else, as {rule.why}."}
        for name, rule in request.only_at.items()
    }
    return {**effectless, **refused}


def _operation(one: Operation, refs: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"summary": one.summary, "tags": [one.tag], "responses": _responses(one, refs)}
    parameters = [_parameter(name, "path") for name in ("name",) if f"{{{name}}}" in one.path]
    if one.paged:
        parameters.append({**_parameter("cursor", "query"), "schema": {"type": "string", "pattern": "^[0-9]{1,9}$"}})
    if parameters:
        told["parameters"] = parameters
    if one.request is not None:
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": refs[one.request, "validation"]}}}
    return told


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _responses(one: Operation, refs: Any) -> dict[str, Any]:
    if one.answer is None:
        schema: dict[str, Any] = {"type": "string"}
    else:
        schema = refs[one.answer, "serialization"]
    content = {one.media: {"schema": {"type": "array", "items": schema} if one.many else schema}}
    if one.streams:
        content[EVENTS] = {"schema": EVENT}
    told: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in sorted({*ALWAYS, *one.statuses}):
        body = one.unavailable if status == 503 else one.error
        told[str(status)] = {
            "description": STATUSES[status],
            "content": {JSON: {"schema": refs[body, "serialization"]}},
        }
    return told
