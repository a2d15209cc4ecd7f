"""The grammar of reasoning before an answer that is held to one: thinking is free, and what comes behind it is held."""

from __future__ import annotations

import json
from collections.abc import Callable

from services.tokenizer.parsers import think
from shared.grammar import GrammarSpec

ANYTHING = "/(?s:.*)/"


def reasoning_rules(inside: bool, token_to_id: Callable[[str], int | None]) -> tuple[str, list[str]]:
    """The piece of a Lark rule that stands before the answer, and the rules that it needs.

    inside: the answer has begun as reasoning and has to end it (it may still open it by itself); else it may begin so.
    """
    opening, close = marker(think.OPEN, token_to_id), marker(think.CLOSE, token_to_id)
    if token_to_id(think.CLOSE) is not None:
        rules = [f"reasoning: thought {close} /\\n{{0,2}}/", f"thought: {ANYTHING}"]
    else:
        rules = ["reasoning: thought /\\n{0,2}/", f"thought[suffix={close}]: {ANYTHING}"]
    if not inside:
        return f"({opening} reasoning)?", rules
    return "reasoning" if token_to_id(think.OPEN) is None else f"{opening}? reasoning", rules


def behind_reasoning(spec: GrammarSpec, inside: bool, token_to_id: Callable[[str], int | None]) -> GrammarSpec:
    """``spec`` for what comes behind reasoning, which is free."""
    piece, rules = reasoning_rules(inside, token_to_id)
    before = "\n".join([f"start: {piece} @answer", *rules, ""])
    return GrammarSpec("behind", json.dumps([before, spec.kind, spec.text]), spec.param)


def marker(text: str, token_to_id: Callable[[str], int | None]) -> str:
    """A marker as a piece of a rule."""
    id = token_to_id(text)
    return json.dumps(text) if id is None else f"<[{id}]>"
