"""Request fields of OpenAI's and vLLM's APIs that have no effect here.

Some never have one and are taken at any value of their type; the others stand for features this server does not have,
and are taken only at the value that asks for nothing. So no client is told that a wish was granted when it was not.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from shared.errors import RequestError

# Levels of a field's value. JSON is read deeper than it is written (orjson: 1024 and 254), and what a request holds is
# written again on its way, with levels around it.
MAX_DEPTH = 200

WITHOUT_EFFECT: dict[str, type] = {
    "metadata": dict,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,
    "user": str,
}
JSON_NAMES = {bool: "boolean", dict: "object", str: "string"}

# Values that ask for nothing, by field; null always does.
ONLY_AT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def drop_without_effect(body: dict[str, Any], known: Container[str]) -> dict[str, Any]:
    """``body`` without the fields of both tables.

    Raises RequestError for one of them that asks for something or is of another type, and for the first field that is
    not ``known`` either.
    """
    kept = {}
    for name, value in body.items():
        if (kind := WITHOUT_EFFECT.get(name)) is not None:
            if value is not None and not isinstance(value, kind):
                message = f"{name}: should be of type {JSON_NAMES[kind]}, got {shown(value)}"
                raise RequestError(message, code="invalid_value", param=name)
            continue
        if name in known:
            kept[name] = value
        elif name not in ONLY_AT:
            raise unknown_field(name)
        elif value is not None and not any(type(value) is type(one) and value == one for one in ONLY_AT[name]):
            # A switch that is off says nothing to who sent a number: completions' logprobs is a count.
            named = [one for one in ONLY_AT[name] if isinstance(value, bool) or not isinstance(one, bool)]
            allowed = " or ".join([*map(repr, named), "null"]).replace("False", "false").replace("True", "true")
            raise RequestError(
                f"{name}: {shown(value)} is not supported; leave it out or give {allowed}",
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
