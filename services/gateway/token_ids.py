"""Fields that hold token ids: prompts, stop tokens, biases. Every id is checked against the vocabulary."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo

from services.gateway.fields import shown
from services.gateway.model import Limits, invalid, limits_of
from shared.errors import RequestError

MAX_PROMPTS = 1024
MAX_STOP_IDS = 1024
MAX_BIASES = 1024
MAX_LOGPROB_IDS = 128

# What the validators below take, for the API's description.
TokenId = Annotated[int, Field(ge=0)]
SomeIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = str | Annotated[list[str] | list[SomeIds] | SomeIds, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _check_ids(place: str, ids: list[Any], vocab_size: int) -> list[int]:
    """Whole-list checks first: they run at C speed, and a prompt may hold a million ids."""
    if set(map(type, ids)) - {int}:
        index, value = next((index, value) for index, value in enumerate(ids) if type(value) is not int)
        raise invalid(f"item {place}[{index}] should be an integer, got {shown(value)}")
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index, value = next((index, value) for index, value in enumerate(ids) if not 0 <= value < vocab_size)
        raise invalid(
            f"item {place}[{index}] is token id {value}, outside the vocabulary of {vocab_size} (0..{vocab_size - 1})"
        )
    return ids


def _check_prompt_ids(place: str, ids: list[Any], limits: Limits, truncated: bool) -> list[int]:
    if not ids:
        raise invalid(f"{'item ' + place if place else 'it'} is an empty list of token ids")
    if not truncated and len(ids) > limits.max_model_len:
        raise RequestError(
            f"prompt: {len(ids)} token ids are more than the model's context of {limits.max_model_len} tokens",
            code="context_length_exceeded",
            param="prompt",
        )
    return _check_ids(place, ids, limits.vocab_size)


def _prompts(value: Any, info: ValidationInfo) -> list[str | list[int]]:
    limits, truncated = limits_of(info), info.data.get("truncate_prompt_tokens") is not None
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid("should be a string, a list of strings, a list of token ids or a list of such lists")
    if value and not isinstance(value[0], (str, list)):
        return [_check_prompt_ids("", value, limits, truncated)]
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise invalid(f"holds {len(value)} prompts, the limits are 1 and {MAX_PROMPTS}")
    prompts: list[str | list[int]] = []
    for index, one in enumerate(value):
        if type(one) is not type(value[0]):
            raise invalid(f"item [{index}] is of another type than item [0], got {shown(one)}")
        is_ids = isinstance(one, list)
        prompts.append(_check_prompt_ids(f"[{index}]", one, limits, truncated) if is_ids else one)
    return prompts


def _stop_ids(value: Any, info: ValidationInfo) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid("should be a list of token ids")
    if len(value) > MAX_STOP_IDS:
        raise invalid(f"holds {len(value)} ids, the limit is {MAX_STOP_IDS}")
    return _check_ids("", value, limits_of(info).vocab_size)


def _allowed_ids(value: Any, info: ValidationInfo) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise invalid("should be a list of at least one token id")
    return _check_ids("", value, limits_of(info).vocab_size)


def _logprob_ids(value: Any, info: ValidationInfo) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_LOGPROB_IDS:
        raise invalid(f"should be a list of 1 to {MAX_LOGPROB_IDS} token ids, got {shown(value)}")
    ids = _check_ids("", value, limits_of(info).vocab_size)
    if len(set(ids)) < len(ids):
        raise invalid("holds a token id twice")
    return ids


def _bias(value: Any, info: ValidationInfo) -> dict[int, float] | None:
    """Token ids, which JSON makes strings, to what is added to their logits."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid("should be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise invalid(f"holds {len(value)} tokens, the limit is {MAX_BIASES}")
    vocab_size, found = limits_of(info).vocab_size, {}
    for name, bias in value.items():
        if not (name.isascii() and name.isdecimal() and len(name) <= 10):
            raise invalid(f"key {shown(name)} should be a token id")
        if not int(name) < vocab_size:
            raise invalid(f"key {int(name)} is outside the vocabulary of {vocab_size} (0..{vocab_size - 1})")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise invalid(f"token {name} should have a number from -100 to 100, got {shown(bias)}")
        found[int(name)] = float(bias)
    return found


def _any_ids(value: Any, info: ValidationInfo) -> list[int]:
    if not isinstance(value, list):
        raise invalid("should be a list of token ids")
    return _check_ids("", value, limits_of(info).vocab_size)


Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts, json_schema_input_type=Prompt)]
StopIds = Annotated[list[int], PlainValidator(_stop_ids, json_schema_input_type=list[TokenId] | None)]
AllowedIds = Annotated[list[int] | None, PlainValidator(_allowed_ids, json_schema_input_type=SomeIds | None)]
LogprobIds = Annotated[list[int] | None, PlainValidator(_logprob_ids, json_schema_input_type=SomeIds | None)]
LogitBias = Annotated[dict[int, float] | None, PlainValidator(_bias, json_schema_input_type=dict[str, Bias] | None)]
TokenIds = Annotated[list[int], PlainValidator(_any_ids, json_schema_input_type=list[TokenId])]
