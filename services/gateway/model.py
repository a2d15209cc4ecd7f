"""The base of everything that a request body is checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.fields import OnlyAt
from shared.sampling import SamplingDefaults


def invalid(message: str) -> PydanticCustomError:
    """What a validator of ours raises; the field's name is put before ``message``."""
    return PydanticCustomError("invalid", "{message}", {"message": message})


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        """Stops at the first unknown field: an object may hold a hundred thousand, and an error of each costs time."""
        if isinstance(value, dict) and cls.model_config.get("extra") == "forbid":
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in value:
                if name not in known:
                    raise PydanticCustomError("unknown_field", "{name}", {"name": name})
        return value


class Told(Model):
    """Part of a conversation or a tool. Further fields are ignored: much of it is what some server or client made.

    What another server, a proxy or a client's library adds to an answer comes back with the history; a field of the
    request itself is a wish, and one that is not known is refused.
    """

    model_config = ConfigDict(extra="ignore")


def _off(value: Any) -> Any:
    """By hand, as a Literal takes 0 for False."""
    if value is not None and value is not False:
        raise invalid("is not supported; leave it out or give false or null")
    return value


Off = Annotated[Literal[False] | None, PlainValidator(_off, json_schema_input_type=Literal[False] | None)]
"""A switch for what is not here."""


class Body(Model):
    """A whole request body. without_effect, only_at: further fields it may hold (see ``services.gateway.fields``)."""

    without_effect: ClassVar[Mapping[str, type]] = {}
    only_at: ClassVar[Mapping[str, OnlyAt]] = {}


@dataclass(frozen=True, slots=True)
class Limits:
    """The model's limits that fields are checked against, and what stands for a field that is left out."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    defaults: SamplingDefaults = SamplingDefaults()


def limits_of(info: ValidationInfo) -> Limits:
    if not isinstance(info.context, Limits):
        raise TypeError("models are validated with their Limits as context")
    return info.context
