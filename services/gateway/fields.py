"""Request fields of OpenAI's, vLLM's and Anthropic's APIs that have no effect here.

Some never have one and are taken at any value of their type; the others stand for features this server does not have,
and are taken only at the values that ask for nothing. So no client is told that a wish was granted when it was not.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import RequestError

# Levels of a field's value. JSON is read deeper than it is written (orjson: 1024 and 254), and what a request holds is
# written again on its way, with levels around it.
MAX_DEPTH = 200
NAME = re.compile(r"[\x21-\x7e]{1,128}")
"""What a client may call something that comes back in headers and logs."""
JSON_NAMES = {bool: "boolean", dict: "object", str: "string"}


@dataclass(frozen=True, slots=True)
class OnlyAt:
    """A field that is refused, because of ``why``, but at ``values``, which ask for nothing; null never does."""

    why: str
    values: tuple[Any, ...] = ()


TEXT_ONLY = "this server takes text only"
STORED = "this server stores nothing; send the whole conversation"
OF_CHATS = "it is a field of chats"

MEDIA = {name: OnlyAt(TEXT_ONLY, ({},)) for name in ("media_io_kwargs", "mm_processor_kwargs")}
# vLLM has these on every API that generates.
VLLM = {
    **MEDIA,
    "ec_transfer_params": OnlyAt(TEXT_ONLY, ({},)),
    "kv_transfer_params": OnlyAt("KV memory is not moved between servers", ({},)),
    "mm_payload": OnlyAt(TEXT_ONLY, ("tensors", "none")),
    "return_mm_kwargs": OnlyAt(TEXT_ONLY, (True, False)),
    "vllm_xargs": OnlyAt("this server has no extensions that would read it", ({},)),
    "watermarking": OnlyAt("answers have no watermark", (False,)),
}

GENERATION_WITHOUT_EFFECT: dict[str, type] = {
    "guided_decoding_backend": str,  # there is one
    "metadata": dict,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "session_id": str,
    "spaces_between_special_tokens": bool,  # no tokenizer here has any
    "store": bool,
    "user": str,
}
# Of chat and text completions; what one of the two knows as a field of its own is not looked up here.
GENERATION_ONLY_AT = {
    **VLLM,
    "add_generation_prompt": OnlyAt(OF_CHATS, (True,)),
    "audio": OnlyAt(TEXT_ONLY),
    "chat_template": OnlyAt(OF_CHATS),
    "chat_template_kwargs": OnlyAt(OF_CHATS, ({},)),
    "continue_final_message": OnlyAt(OF_CHATS, (False,)),
    "detokenize": OnlyAt("answers are text; return_token_ids adds the ids", (True,)),
    "documents": OnlyAt(OF_CHATS, ([],)),
    "function_call": OnlyAt(OF_CHATS, ("none", "auto")),
    "functions": OnlyAt(OF_CHATS, ([],)),
    "guided_whitespace_pattern": OnlyAt("give structured_outputs with its whitespace_pattern"),
    "include_reasoning": OnlyAt(OF_CHATS, (True, False)),
    "logits_processors": OnlyAt("this server runs no code of its clients", ([],)),
    "modalities": OnlyAt(TEXT_ONLY, (["text"],)),
    "moderation": OnlyAt("this server has no moderation model"),
    "parallel_tool_calls": OnlyAt(OF_CHATS, (True, False)),
    "prediction": OnlyAt(OF_CHATS),
    "prompt_embeds": OnlyAt("prompts are text or token ids"),
    "reasoning_effort": OnlyAt(OF_CHATS),
    "repetition_detection": OnlyAt("repetitions do not end an answer; see repetition_penalty"),
    "return_prompt_text": OnlyAt("echo has the prompt before its continuation", (False,)),
    "return_token_offsets": OnlyAt("tokens are told without offsets", (False,)),
    "routed_experts_prompt_start": OnlyAt("no model here has experts", (0,)),
    "suffix": OnlyAt("texts are continued, not filled in", ("",)),
    "thinking_token_budget": OnlyAt("how long it thinks is the model's affair"),
    "tool_choice": OnlyAt(OF_CHATS, ("none", "auto")),
    "tools": OnlyAt(OF_CHATS, ([],)),
    "top_logprobs": OnlyAt(OF_CHATS, (0,)),
    "verbosity": OnlyAt(OF_CHATS, ("medium",)),
    "web_search_options": OnlyAt("this server runs no tools itself"),
}


def drop_without_effect(
    body: Mapping[str, Any], known: Container[str], without_effect: Mapping[str, type], only_at: Mapping[str, OnlyAt]
) -> dict[str, Any]:
    """``body`` without the fields of both tables; one that is ``known`` is in none.

    Raises RequestError for one of them that asks for something or is of another type, and for the first field that is
    nowhere.
    """
    kept = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif (kind := without_effect.get(name)) is not None:
            if value is not None and type(value) is not kind:
                message = f"{name}: should be of type {JSON_NAMES[kind]}, got {shown(value)}"
                raise RequestError(message, code="invalid_value", param=name)
        elif (rule := only_at.get(name)) is None:
            raise unknown_field(name)
        elif value is not None and not any(type(value) is type(one) and value == one for one in rule.values):
            # A switch that is off says nothing to who sent a number: completions' logprobs is a count.
            named = [one for one in rule.values if isinstance(value, bool) or not isinstance(one, bool)]
            allowed = " or ".join([*map(repr, named), "null"]).replace("False", "false").replace("True", "true")
            raise RequestError(
                f"{name}: {shown(value)} is not supported: {rule.why}; leave it out or give {allowed}",
                code="unsupported_value",
                param=name,
            )
    return kept


def unknown_field(path: str) -> RequestError:
    path = path[:100]
    return RequestError(f"{path}: this field is not known", code="unknown_parameter", param=path)


def nests_too_deeply(value: Any) -> bool:
    """Whether lists and objects are in each other over MAX_DEPTH levels deep. Goes level by level, not recursively."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(MAX_DEPTH):
        insides = (one.values() if isinstance(one, dict) else one for one in level)
        level = [inner for inside in insides for inner in inside if isinstance(inner, (list, dict))]
    return bool(level)


def shown(value: Any, limit: int = 80) -> str:
    """``value`` for an error message: short, whatever it is."""
    if isinstance(value, str):
        text = repr(value[: limit + 1])
    elif isinstance(value, (list, dict)) and len(value) > 8:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    else:
        text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
