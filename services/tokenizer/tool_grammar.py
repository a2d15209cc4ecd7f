"""Grammars of answers that have to call a function, or may: how each format writes calls, and reasoning before them.

In llguidance's form of Lark. A parameter schema is a rule of its own, because its references are to its own root.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from services.tokenizer.grammars import json_rule
from services.tokenizer.parsers import hermes, mistral
from services.tokenizer.parsers.output import OutputFormat
from services.tokenizer.reasoning_grammar import ANYTHING, marker, reasoning_rules
from shared.grammar import GrammarSpec
from shared.wire import ToolUse

OBJECT = {"type": "object"}
MAX_CALLS = 16  # of a demand: a small model that may repeat a call for ever does
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_grammar(
    use: ToolUse, format: OutputFormat, inside: bool, token_to_id: Callable[[str], int | None]
) -> GrammarSpec | None:
    """What ``use`` makes of answers; ``inside``: they begin as reasoning.

    One call of the function it names; one or more calls of any, where it requires them; with choice ``auto`` and strict
    functions text with calls in it, of which those of strict functions fit their schemas. None: nothing is asked for,
    or (strict functions in a format without a marker) cannot be had.
    """
    return _Grammar(use, format, token_to_id).spec(inside)


def parameter_specs(use: ToolUse) -> list[GrammarSpec]:
    """The schemas of the functions that ``use`` holds calls to, each by itself, to tell what is wrong with one."""
    return [
        GrammarSpec("json", json.dumps(_schema(use, tool["function"])), f"tools.{number}.function.parameters")
        for number, tool in enumerate(use.tools)
        if use.choice != "function" or tool["function"]["name"] == use.function
    ]


def _schema(use: ToolUse, function: dict[str, Any]) -> dict[str, Any]:
    if use.choice == "auto" and not function.get("strict"):
        return OBJECT
    schema: dict[str, Any] = function.get("parameters") or NO_PARAMETERS
    return {**OBJECT, **schema}


class _Grammar:
    def __init__(self, use: ToolUse, format: OutputFormat, token_to_id: Callable[[str], int | None]) -> None:
        self._use, self._format, self._token_to_id = use, format, token_to_id
        self._functions = [tool["function"] for tool in use.tools]
        if use.choice == "function":
            self._functions = [function for function in self._functions if function["name"] == use.function]
        self._several = use.parallel and use.choice != "function"
        self._opening = ""  # the marker before a call; the rule ``body`` is all behind it
        self._between = ""  # two calls
        self._times = f"{{0,{MAX_CALLS - 1}}}"  # how often a further call may come
        self._rules: list[str] = []

    def spec(self, inside: bool) -> GrammarSpec | None:
        {"hermes": self._hermes, "llama3_json": self._llama3, "mistral": self._mistral}[self._format.tools]()
        if self._use.choice != "auto":
            self._demand()
        elif self._opening and any(function.get("strict") for function in self._functions):
            self._allow()
        else:
            return None
        for number, function in enumerate(self._functions):
            self._rules.append(f"arguments_{number}: {json_rule(_schema(self._use, function))}")
        reasoning = ""
        if self._format.reasoning:
            reasoning, rules = reasoning_rules(inside, self._token_to_id)
            self._rules += rules
        start = f"start: {reasoning} answer"
        return GrammarSpec("grammar", "\n".join([start, *self._rules, ""]), "tools")

    # ---- the whole answer ----

    def _demand(self) -> None:
        opening = self._marker(self._opening) if self._opening else ""
        more = f"({json.dumps(self._between)} call){self._times}" if self._several and self._between else ""
        self._rules += [f"answer: call {more}", f"call: {opening} body"]

    def _allow(self) -> None:
        """Text goes on up to a marker, and what comes after one is a call."""
        times = "*" if self._several else "?"
        opening = self._marker(self._opening)
        if self._is_token(self._opening):
            self._rules += [f"answer: text ({opening} body text){times}", f"text: {ANYTHING}"]
            return
        self._rules += [
            f"answer: (text body){times} REST",
            f"text[suffix={opening}]: {ANYTHING}",
            f"REST: {ANYTHING} & ~/(?s:.*{_quoted(self._opening)}.*)/",
        ]

    # ---- calls ----

    def _hermes(self) -> None:
        self._opening, self._between = hermes.OPEN, "\n"
        self._rules.append(f'body: "\\n" object "\\n" {self._marker(hermes.CLOSE)}')
        self._objects("arguments")

    def _llama3(self) -> None:
        self._between = "; "
        self._rules.append("body: object")
        self._objects("parameters")

    def _mistral(self) -> None:
        """A vocabulary with the token before arguments is one of the newer form, in which each call has a marker."""
        self._opening = mistral.OPEN
        if self._is_token(mistral.ARGS):
            args = self._marker(mistral.ARGS)
            named = [f"{json.dumps(one['name'])} {args} arguments_{n}" for n, one in enumerate(self._functions)]
            more = f"({self._marker(mistral.OPEN)} called){self._times}" if self._several else ""
            self._rules += [f"body: called {more}", "called: " + " | ".join(named)]
        else:
            more = f'(", " object){self._times}' if self._several else ""
            self._rules.append(f'body: "[" object {more} "]"')
            self._objects("arguments")

    def _objects(self, key: str) -> None:
        kinds: Sequence[str] = [f"object_{number}" for number in range(len(self._functions))]
        self._rules.append("object: " + " | ".join(kinds))
        for number, function in enumerate(self._functions):
            head = json.dumps(f'{{"name": "{function["name"]}", "{key}": ')
            self._rules.append(f'object_{number}: {head} arguments_{number} "}}"')

    # ---- markers ----

    def _is_token(self, marker: str) -> bool:
        return self._token_to_id(marker) is not None

    def _marker(self, text: str) -> str:
        return marker(text, self._token_to_id)


def _quoted(marker: str) -> str:
    """For a regular expression in a rule."""
    return "".join(f"\\{char}" if char in "[]|/" else char for char in marker)
