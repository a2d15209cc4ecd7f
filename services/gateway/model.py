"""The base of everything that a request body is checked against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

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
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields and name not in cls._aliases():
                    raise PydanticCustomError("unknown_field", "{name}", {"name": name})
        return value

    @classmethod
    def _aliases(cls) -> set[str | None]:
        return {field.alias for field in cls.model_fields.values()}


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
