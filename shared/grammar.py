"""Grammars that outputs are held to: as requests ask for them, and as ``llguidance`` runs them.

The tokenizer compiles a ``GrammarSpec`` once, to refuse what is wrong with it; the scheduler runs what comes out. Both
use the same vocabulary and the same limits, so what one took the other takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import QuireError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 1 << 18
"""Of a schema, regex, list of choices or grammar."""


class GrammarError(QuireError):
    """No output can be held to this grammar; the message says why."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A wish about an output.

    kind: ``json`` (text is a JSON Schema), ``regex``, ``choice`` (a JSON array of strings) or ``grammar`` (llguidance's
    form of Lark, or GBNF); in the tokenizer also ``behind`` (a JSON array: Lark rules with ``@answer`` in them, and the
    kind and the text of that). param: the request's field that it comes from, for errors.
    """

    kind: str
    text: str
    param: str


def load_vocabulary(folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary of a model folder, ``vocab_size`` tokens as the worker has them, of which ``eos_ids`` end a text.

    Takes half a second for 50,000 tokens. Raises GrammarError when the folder has no tokenizer.json that can be used.
    """
    from llguidance import LLTokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise GrammarError(f"{folder} has no tokenizer.json")
    if not eos_ids:
        raise GrammarError(f"the model in {folder} has no EOS token, so no output could end")
    try:
        return LLTokenizer(str(file), n_vocab=vocab_size, eos_token=list(eos_ids))
    except Exception as error:  # the library raises plain Exception and ValueError
        raise GrammarError(f"{file} cannot be used for grammars: {first_line(str(error))}") from error


def new_matcher(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """What runs ``grammar`` (llguidance's JSON form, or Lark), at its beginning. The GIL is released meanwhile.

    The limits bound what a grammar holds and what a step costs: what grows in an ambiguous one is its items in a row,
    whose square it takes. What building it costs is for the caller to bound. Raises GrammarError for what is wrong with
    the grammar or beyond the limits.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(reason_of(matcher))
    return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher is in error, in one line."""
    message = first_line(matcher.get_error())
    return "it leaves no way to go on" if message.startswith("NoExtension") else message


def first_line(text: str, limit: int = 300) -> str:
    """What there is to read in an error of the library, whose first line may be empty and whose others are drawings."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = lines[0] if lines else text
    if message.endswith("regex parse error:"):
        message += " " + next((line for line in lines if line.startswith("error:")), "")
    return message[:limit]
