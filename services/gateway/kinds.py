"""Fields that hold one of several kinds of object, told apart by their ``type``.

pydantic's own unions put the names of their branches into the path of an error; here the path stays what the client
sent, and a kind that exists elsewhere but is not supported here is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from typing import Any

from pydantic import BaseModel, PlainValidator, ValidationInfo

from services.gateway.fields import shown
from services.gateway.model import invalid


def pick(
    value: Any, kinds: Mapping[str, type[BaseModel]], refused: Mapping[str, str], default: str, info: ValidationInfo
) -> Any:
    """``value`` as the model of its ``type``; of ``default`` when it has none.

    refused: types that get an error of their own, which says why.
    """
    if not isinstance(value, dict):
        raise invalid(f"should be an object with a type, got {shown(value)}")
    name = value.get("type") or default
    if not isinstance(name, str) or name not in kinds:
        why = refused.get(name, "") if isinstance(name, str) else ""
        raise invalid(f"type {shown(name)} is not supported{why and ': ' + why}; supported: {', '.join(kinds)}")
    return kinds[name].model_validate(value, context=info.context)


def by_type(kinds: Mapping[str, type[BaseModel]], refused: Mapping[str, str], default: str = "") -> PlainValidator:
    """``pick`` as a field's validator."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        return pick(value, kinds, refused, default, info)

    return PlainValidator(validate, json_schema_input_type=reduce(or_, dict.fromkeys(kinds.values())))


def joined(parts: Iterable[Any]) -> str:
    """The text of a message, whose parts are joined by line ends."""
    return "\n".join(part.plain for part in parts)
