"""A process that compiles grammars, one after another, for the tokenizer that started it.

A thread that compiles cannot be stopped, and small schemas can take minutes (vllm #54003). This process can: the kernel
ends it when a grammar has used up its time or its memory, and the tokenizer starts another.

Frames on stdin and stdout have their length before them, 4 bytes, little-endian. In: msgpack ``[kind, text]``. Out:
``[grammar, error]``, one of which is empty; the first is about the vocabulary.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from services.tokenizer.grammar_errors import explained, subschemas
from shared.codec import pack, unpack
from shared.grammar import GrammarError, load_vocabulary, new_matcher, reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

CPU_SECONDS = 1.5
"""Of processor time, for one grammar; most take milliseconds."""
OVERTIME = signal.SIGPROF
"""What the kernel ends the process with when a grammar has used them up."""
MEMORY = 4 << 30
"""Of address space, most of which is never touched."""
WALK = 8
"""Tokens, and all that is forced between them, for which a new grammar is followed."""
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""How JSON is written where a request leaves it open: on one line, with a space behind separators or without.

More space would tell nothing and cost tokens, and a small model that may write blanks for ever does. llguidance's
options; the separators are regular expressions.
"""
MOST_OPTIONAL, MOST_OPTIONAL_CLOSED, MOST_BEFORE_REQUIRED = 248, 250, 333
"""Optional properties that fit in a row of ``new_matcher``: of an object with none that is required, open or with
``additionalProperties`` false, and those before the first that is required; behind that one there is no limit."""


def main(argv: Sequence[str]) -> int:
    folder, vocab_size, *eos_ids = argv
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.nice(5)  # requests that run go before those that may run
    try:
        vocabulary = load_vocabulary(Path(folder), int(vocab_size), list(map(int, eos_ids)))
    except GrammarError as error:
        _write(sys.stdout.buffer, ["", str(error)])
        return 1
    _write(sys.stdout.buffer, ["", ""])
    while (frame := _read(sys.stdin.buffer)) is not None:
        kind, text = unpack(frame)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            grammar = serialize(kind, text)
            matcher = new_matcher(vocabulary, grammar)
            _walk(matcher, set(map(int, eos_ids)))
            answer = ["", explained(kind, text, reason_of(matcher))] if matcher.is_error() else [grammar, ""]
        except GrammarError as error:
            answer = ["", explained(kind, text, str(error)) or "it is no grammar"]
        _write(sys.stdout.buffer, answer)
    return 0


def _walk(matcher: LLMatcher, eos_ids: set[int]) -> None:
    """Follows some output for a few tokens, into an error where there is one.

    The first mask is the dearest, and shows whether there is any way to go on. What lies beyond the limits may be a few
    tokens behind: a row for each of an object's many optional properties stands behind its brace.
    """
    for _ in range(WALK):
        matcher.consume_tokens(matcher.compute_ff_tokens())
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error() or matcher.is_stopped():
            return
        going_on = (token for token in np.flatnonzero(allowed).tolist() if token not in eos_ids)
        if (token := next(going_on, None)) is None or not matcher.consume_token(token):
            return


def serialize(kind: str, text: str) -> str:
    """A GrammarSpec's text in llguidance's own form. Raises GrammarError; what is inside is not checked yet."""
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        match kind:
            case "json":
                schema = json.loads(text)
                _check_objects(schema)
                return str(LLMatcher.grammar_from_json_schema(json.dumps(_with_style(schema))))
            case "regex":
                # As in JavaScript and JSON Schema, \d and \w are ASCII: who asks for digits wants no others.
                return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dw')}/"))
            case "choice":
                options = (json.dumps(option, ensure_ascii=False) for option in json.loads(text))
                return str(LLMatcher.grammar_from_lark("start: " + " | ".join(options)))
            case "grammar":
                return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
            case "behind":
                before, kind, text = json.loads(text)
                answer = serialize(kind, text)
                # What is named here: a grammar beside the first, of its own rules and references.
                second = json.loads(answer)["grammars"][0] if kind == "json" else {"lark_grammar": answer}
                return json.dumps({"grammars": [{"lark_grammar": before}, {"name": "answer", **second}]})
    except GrammarError:
        raise
    except Exception as error:  # GBNF is converted by patterns, and what they stumble over raises anything
        raise GrammarError(str(error)[:300]) from error
    raise GrammarError(f"there is no kind of grammar {kind!r}")


def _check_objects(schema: object) -> None:
    """Raises GrammarError for an object that would fail once it is reached, which may be long after its beginning."""
    for path, one in subschemas(schema):
        properties, required = one.get("properties"), one.get("required")
        if not isinstance(properties, dict) or "object" not in one.get("type", "object"):
            continue
        limit = MOST_OPTIONAL_CLOSED if one.get("additionalProperties") is False else MOST_OPTIONAL
        names = list(properties)
        if isinstance(required, list) and required:
            limit = MOST_BEFORE_REQUIRED
            names = names[: next((place for place, name in enumerate(names) if name in required), None)]
        if len(names) > limit:
            where = f"{path}/properties"[-100:]
            raise GrammarError(f"{where}: {len(names)} optional properties in a row, more than {limit}")


def _with_style(schema: object) -> object:
    if schema is True:
        schema = {}
    return {"x-guidance": JSON_STYLE, **schema} if isinstance(schema, dict) else schema


def _read(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end of the stream."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 4 else None


def _write(stream: BinaryIO, message: list[str]) -> None:
    body = pack(message)
    stream.write(len(body).to_bytes(4, "little") + body)
    stream.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
