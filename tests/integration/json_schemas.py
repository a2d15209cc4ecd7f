"""200 JSON Schemas of varied features: some written by hand, the others grown from a seed."""

from __future__ import annotations

import random
from typing import Any

WORD: dict[str, Any] = {"type": "string", "pattern": "^[a-z]{1,8}$"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 99}


def record(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


BY_HAND: list[Any] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    {"type": "integer", "minimum": 1000, "maximum": 100_000},
    {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 7},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -2.5, "maximum": 2.5},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "pattern": r"^\w+@\w{2,5}\.(com|org)$", "maxLength": 20},
    {"type": "string", "pattern": "^(yes|no)$"},
    {"type": "string", "pattern": r"^\d{1,3}(,\d{3}){0,2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "duration"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": ["string", "boolean"], "maxLength": 5},
    {"const": {"a": [1, "two", None, True, 1.5]}},
    {"const": 'quotes " and \\ and \n and é and 😀'},
    {"enum": ["red", "green", "blue", 7, None, False]},
    {"enum": ["a/b", "tab\there", "naïve", "日本"]},
    {"enum": [[1, 2], {"k": "v"}]},
    {"type": "string", "enum": ["north", "south"]},
    {"type": "array", "items": COUNT, "maxItems": 4},
    {"type": "array", "items": WORD, "minItems": 2, "maxItems": 3},
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [COUNT, WORD], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": COUNT, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": COUNT, "maxItems": 2}, "minItems": 1, "maxItems": 2},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 5, "maxItems": 5},
    record(),
    record(name=WORD, age=COUNT),
    record(**{"ключ": WORD, "with space": COUNT, 'quo"te': {"type": "null"}}),
    record(deep=record(deeper=record(deepest=record(value={"type": "boolean"})))),
    {"type": "object", "properties": {"a": COUNT, "b": WORD}, "additionalProperties": False},
    {"type": "object", "properties": {"a": COUNT, "b": WORD}, "required": ["b"], "additionalProperties": False},
    {"type": "object", "properties": dict.fromkeys("abcdef", COUNT), "required": ["f"], "additionalProperties": False},
    {"anyOf": [COUNT, WORD]},
    {"anyOf": [record(kind={"const": "a"}, size=COUNT), record(kind={"const": "b"}, name=WORD)]},
    {"oneOf": [{"type": "boolean"}, COUNT]},
    {"oneOf": [record(kind={"const": "circle"}, radius=COUNT), record(kind={"const": "square"}, side=COUNT)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    {"$defs": {"point": record(x=COUNT, y=COUNT)}, "type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
    {"definitions": {"w": WORD}, **record(first={"$ref": "#/definitions/w"}, second={"$ref": "#/definitions/w"})},
    {
        "$defs": {"tree": record(value=COUNT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]})},
        "$ref": "#/$defs/tree",
    },
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": COUNT}},
    {"title": "With notes", "description": "ignored", "$comment": "too", "default": 3, "examples": [4], **COUNT},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/x", **record(ok=COUNT)},
    record(
        when={"type": "string", "format": "date"},
        who={"enum": ["me", "you"]},
        many={"type": "array", "items": COUNT, "maxItems": 2},
    ),
    record(maybe={"anyOf": [{"type": "null"}, record(inner=WORD)]}, flag={"type": "boolean"}),
    {"type": "array", "items": record(id=COUNT), "maxItems": 2},
]


def grow(rng: random.Random, depth: int, refers: bool = True) -> dict[str, Any]:
    """A schema of random parts, whose instances are short. refers: to ``shared`` among its definitions."""
    leaves = ["boolean", "null", "integer", "number", "word", "text", "enum", "const", "date"]
    kind = rng.choice(leaves if depth == 0 else [*leaves, "record", "record", "record", "array", "array", "any", "ref"])
    match kind:
        case "boolean" | "null":
            return {"type": kind}
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 1, 9, 1000])}
        case "number":
            low = rng.randint(-100, 100) / 4
            return {"type": "number", "minimum": low, "maximum": low + rng.choice([0.5, 10])}
        case "word":
            return {"type": "string", "pattern": f"^[{rng.choice(['a-z', 'A-F0-9', 'xyz'])}]{{1,{rng.randint(1, 9)}}}$"}
        case "text":
            least = rng.randint(0, 4)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}
        case "enum":
            pool = ["red", "no", "", "ö", "a b", 0, -7, 2.5, None, True, "{}", "\\"]
            return {"enum": rng.sample(pool, rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice([1, "x", None, [1, [2]], {"a": {"b": []}}, "\u2028", 'say "hi"'])}
        case "date":
            return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4", "time"])}
        case "array":
            least = rng.randint(0, 2)
            items = grow(rng, depth - 1, refers)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
        case "any":
            return {"anyOf": [grow(rng, depth - 1, refers) for _ in range(rng.randint(1, 3))]}
        case "ref":
            shared = [{"$ref": "#/$defs/shared"}] if refers else []
            return {"anyOf": [*shared, grow(rng, depth - 1, refers)]}
    names = rng.sample(["id", "name", "größe", "a b", "x", "items", "$ref2", 'q"', "0"], rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: grow(rng, depth - 1, refers) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def schemas(count: int = 200) -> list[dict[str, Any]]:
    rng = random.Random(6)
    grown = [{"$defs": {"shared": grow(rng, 1, refers=False)}, **grow(rng, 3)} for _ in range(count - len(BY_HAND))]
    return [*BY_HAND, *grown]
