"""What is wrong with a grammar, said for who wrote it: llguidance's words name its own parts, and no place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

VALUES = ("const", "default", "enum", "examples")  # what they hold is no schema
LENGTH = 300  # of a message

Schema = dict[str, Any]


def explained(kind: str, text: str, reason: str) -> str:
    """``reason`` why a GrammarSpec of this kind and text cannot be used, as one sentence without its subject."""
    if kind == "regex":
        return _of_regex(reason, "it is no regular expression")[:LENGTH]
    if kind != "json":
        return reason[:LENGTH]
    if "recursion limit" in reason:
        return "it nests too deeply"
    for pattern, told in _REASONS:
        if found := re.match(pattern, reason):
            message, concerns = told(found)
            return (message + _place(text, concerns))[:LENGTH]
    return _of_regex(reason, "a pattern in it is no regular expression")[:LENGTH]


def subschemas(schema: object, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every object in a schema that may be one itself, with its path, ``/properties/a``."""
    if isinstance(schema, list):
        for place, item in enumerate(schema):
            yield from subschemas(item, f"{path}/{place}")
    elif isinstance(schema, dict):
        yield path, schema
        for key, value in schema.items():
            if key not in VALUES:
                yield from subschemas(value, f"{path}/{key}")


Told = tuple[str, Callable[[Schema], bool]]
"""A message, and which of a schema's objects it may be about."""


def _keys(found: re.Match[str]) -> Told:
    keys = json.loads(found[1])
    names = ", ".join(f'"{key}"' for key in keys)
    return f"{names} {'is' if len(keys) == 1 else 'are'} not supported", lambda one: keys[0] in one


def _one_of(found: re.Match[str]) -> Told:
    message = '"oneOf" is supported only where no value can fit two of its branches; "anyOf" is'
    return message, lambda one: "oneOf" in one


def _format(found: re.Match[str]) -> Told:
    return f'the format "{found[1]}" is not supported', lambda one: one.get("format") == found[1]


def _type(found: re.Match[str]) -> Told:
    return f'"{found[1]}" is no type of JSON Schema', lambda one: found[1] in _list(one.get("type"))


def _far(found: re.Match[str]) -> Told:
    return f'"$ref" leads to {found[1]}, out of the schema, and nothing is fetched', _refers_to(found[1])


def _nowhere(found: re.Match[str]) -> Told:
    return f'"$ref" leads to "#{found[1]}", which is not in the schema', _refers_to(found[1])


def _nothing_fits(found: re.Match[str]) -> Told:
    why = found[1]
    if why.startswith("Regex is empty"):
        why = "its pattern, format and lengths contradict each other"
    return f"nothing can fit it: {why}", lambda one: False


def _too_complex(found: re.Match[str]) -> Told:
    return "it is too complex: at some place it has too many ways to go on", lambda one: False


_REASONS: list[tuple[str, Callable[[re.Match[str]], Told]]] = [
    (r"Unimplemented keys: (\[.*\])$", _keys),
    (r"oneOf constraints are not supported", _one_of),
    (r"Unknown format: (.*)", _format),
    (r"Invalid type: (.*)", _type),
    (r"Resource '(.*?)' is not present", _far),
    (r"Pointer '(.*?)' does not exist", _nowhere),
    (r"Unsatisfiable schema: (.*)", _nothing_fits),
    (r"Parser Error: Current row has", _too_complex),
]


def _of_regex(reason: str, otherwise: str) -> str:
    if "look-around" in reason:
        return "look-ahead and look-behind are not supported in regular expressions"
    return re.sub(r"^.*regex parse error: error: ", f"{otherwise}: ", reason)


def _place(text: str, concerns: Callable[[Schema], bool]) -> str:
    """Where in the schema it is, if only one place can be meant."""
    paths = [path for path, one in subschemas(json.loads(text)) if concerns(one)]
    return f" (at {paths[0][-100:]})" if len(paths) == 1 and paths[0] else ""


def _refers_to(target: str) -> Callable[[Schema], bool]:
    return lambda one: isinstance(one.get("$ref"), str) and target in one["$ref"]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]
