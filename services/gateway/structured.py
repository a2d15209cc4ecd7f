"""What an output has to be: ``response_format``, ``structured_outputs``, vLLM's older guided fields; all one wish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field, PlainValidator

from services.gateway.fields import MAX_DEPTH, nests_too_deeply, shown
from services.gateway.kinds import by_type
from services.gateway.model import Model, invalid
from shared.errors import RequestError
from shared.grammar import MAX_GRAMMAR_CHARS, GrammarSpec

MAX_CHOICES = 4096
NO_TAGS = "structural tags are not built; give a grammar, or tools"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

Schema = dict[str, Any] | bool
Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[
    list[Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]], Field(min_length=1, max_length=MAX_CHOICES)
]


def _schema(value: Any) -> Schema | None:
    """A JSON Schema, as an object or as its text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise invalid(f"is not JSON: {error}") from error
        if nests_too_deeply(value):
            raise invalid(f"lists and objects nest deeper than the limit of {MAX_DEPTH} levels")
    if value is not None and not isinstance(value, (dict, bool)):
        raise invalid(f"should be a JSON Schema, an object or its text, got {shown(value)}")
    return value


AnySchema = Annotated[Schema | None, PlainValidator(_schema, json_schema_input_type=Schema | str | None)]


def _switch(value: Any) -> Any:
    """By hand, as a Literal takes 0 for False."""
    if value is not None and not isinstance(value, bool):
        raise invalid(f"should be a boolean, got {shown(value)}")
    return value


class JSONSchema(Model):
    """strict changes nothing: the output is held to the schema in any case."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: AnySchema = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    def grammar(self) -> GrammarSpec | None:
        if (self.json_schema is None) == (self.type == "json_schema"):
            field = "response_format.json_schema"
            problem = "required with" if self.json_schema is None else "not used with"
            raise RequestError(f"{field}: {problem} type {self.type!r}", code="invalid_value", param=field)
        if self.json_schema is not None:
            field = "response_format.json_schema.schema"
            if self.json_schema.schema_ is None:
                message = f"{field}: this field is required"
                raise RequestError(message, code="missing_required_parameter", param=field)
            return _of_schema(self.json_schema.schema_, field)
        return _of_schema(ANY_OBJECT, "response_format") if self.type == "json_object" else None


AnyResponseFormat = Annotated[
    ResponseFormat,
    by_type(dict.fromkeys(("text", "json_object", "json_schema"), ResponseFormat), {"structural_tag": NO_TAGS}),
]


def _no_tag(value: Any) -> None:
    if value is not None:
        raise invalid(f"is not supported: {NO_TAGS}")


class StructuredOutputs(Model):
    """vLLM's ``structured_outputs``. disable_fallback: there is one engine here, so nothing else is tried anyway."""

    json_: AnySchema = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[Literal[False] | None, BeforeValidator(_switch)] = None
    whitespace_pattern: Text | None = None
    structural_tag: Annotated[None, PlainValidator(_no_tag, json_schema_input_type=None)] = None

    def options(self) -> dict[str, Any]:
        """llguidance's, which travel in the schema."""
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False}
        return {} if self.whitespace_pattern is None else {"whitespace_pattern": self.whitespace_pattern}


def grammar_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: Mapping[str, Any],
) -> GrammarSpec | None:
    """The one wish of a request, if it has any. guided: vLLM's older fields, by name.

    Raises RequestError 400 for two of them, and for a schema or grammar of more than MAX_GRAMMAR_CHARS characters.
    """
    found: dict[str, GrammarSpec] = {}
    if response_format is not None and (grammar := response_format.grammar()) is not None:
        found["response_format"] = grammar
    if structured is not None:
        wishes = {
            "json": structured.json_,
            "regex": structured.regex,
            "choice": structured.choice,
            "grammar": structured.grammar,
            "json_object": structured.json_object or None,
        }
        for name, value in wishes.items():
            if value is not None:
                field = f"structured_outputs.{name}"
                found[field] = _of(name, value, field, structured.options())
        if not found:
            names = ", ".join(wishes)
            raise RequestError(
                f"structured_outputs: give one of {names}", code="invalid_value", param="structured_outputs"
            )
    for field, value in guided.items():
        if value is not None:
            found[field] = _of(field.removeprefix("guided_"), value, field, {})
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(f"{second}: contradicts {first}; give one of them", code="invalid_value", param=second)
    grammar = next(iter(found.values()), None)
    if grammar is not None and len(grammar.text) > MAX_GRAMMAR_CHARS:
        message = f"{grammar.param}: {len(grammar.text)} characters, the limit is {MAX_GRAMMAR_CHARS}"
        raise RequestError(message, code="invalid_value", param=grammar.param)
    return grammar


def _of(kind: str, value: Any, field: str, options: dict[str, Any]) -> GrammarSpec:
    if kind == "choice":
        return GrammarSpec("choice", orjson.dumps(value).decode(), field)
    if kind in ("json", "json_object"):
        return _of_schema(ANY_OBJECT if kind == "json_object" else value, field, options)
    return GrammarSpec(kind, value, field)


def _of_schema(schema: Mapping[str, Any] | bool, field: str, options: Mapping[str, Any] | None = None) -> GrammarSpec:
    if options:
        schema = {**(schema if isinstance(schema, dict) else {} if schema else {"not": {}}), "x-guidance": options}
    return GrammarSpec("json", orjson.dumps(schema).decode(), field)
