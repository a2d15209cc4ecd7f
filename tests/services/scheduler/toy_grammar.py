"""Grammars over the simulation's 64 tokens, and what the null model answers under one, computed token by token."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from services.scheduler.grammar import Grammar
from services.worker.null import BASE
from tests.services.scheduler.simulation import EOS, MASK, VOCAB, mixed

_LONGER = ["ab", "abc", "name", "age", "true", "false", "12", "xy", 'e":', '{"', '"}', '","', "345", "ca", "xyx"]
SPELLINGS = ["<0>", "<1>", "<eos>", *string.ascii_lowercase, *string.digits, *'{}":,[] -_', *_LONGER]

GRAMMARS = [
    'start: "abcabcabcabcname"',  # leaves no choice at all
    'start: ""',
    "start: /[a-z]*/",
    'start: /[a-c]{2,9}/ "name" /[0-9]+/ "}"',
    'start: ("abab" | "xyxyxyxyxyxyname") /[0-9]{3}/ "{abcage}"',
    'start: "{" /[0-9]{1,30}/ ("," /[a-z]/ "truetruetrue")* "}"',
    'start: "na" (/[xy]/ "namenamename")+',
    str(
        LLMatcher.grammar_from_json_schema(
            {
                "type": "object",
                "properties": {"name": {"enum": ["ab", "abc", "xyxyxy"]}, "age": {"type": "integer"}},
                "required": ["name", "age"],
                "additionalProperties": False,
                "x-guidance": {"whitespace_flexible": False},
            }
        )
    ),
]


class _Tokenizer:
    eos_token_id, bos_token_id, special_token_ids = EOS, None, (0, 1, EOS)
    tokens = tuple(spelling.encode() for spelling in SPELLINGS)

    def __call__(self, text: bytes) -> list[int]:
        """The longest token each time."""
        ids = []
        while text:
            known = [id for id in range(3, VOCAB) if text.startswith(self.tokens[id])]
            ids.append(max(known, key=lambda id: len(self.tokens[id])))
            text = text[len(self.tokens[ids[-1]]) :]
        return ids


@cache
def vocabulary() -> LLTokenizer:
    assert len(SPELLINGS) == len(set(SPELLINGS)) == VOCAB
    return LLTokenizer(TokenizerWrapper(_Tokenizer()), n_vocab=VOCAB, eos_token=EOS)


@cache
def _matcher(grammar: str) -> LLMatcher:
    matcher = LLMatcher(vocabulary(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def new_grammar(grammar: str) -> Grammar:
    return Grammar(_matcher(grammar).deep_copy())


def text_of(ids: Sequence[int]) -> str:
    return "".join(SPELLINGS[id] for id in ids if id != EOS)


def constrained_output(
    prompt: list[int], grammar: str, count: int, temperature: float = 0.0, seed: int = 0
) -> tuple[list[int], str]:
    """What the null model answers, and why that ends: token after token, from masks alone but for what is forced."""
    matcher = _matcher(grammar).deep_copy()
    total = sum((token + 1) * pow(BASE, position, 1 << 64) for position, token in enumerate(prompt)) & MASK
    output: list[int] = []
    forced: list[int] = []
    while True:
        if not forced:
            forced = matcher.compute_ff_tokens()
            assert matcher.consume_tokens(forced)
        if not forced and matcher.is_stopped():
            return output, "stop"
        if forced:
            token, *forced = forced
        else:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB]
            allowed = np.flatnonzero(bits).tolist()
            if allowed == [EOS]:
                return output, "stop"
            if len(output) == count:
                return output, "length"
            token = allowed[mixed(total + (mixed((seed + 1) & MASK) if temperature > 0 else 0)) % len(allowed)]
            assert matcher.consume_token(token)
        if len(output) == count:
            return output, "length"
        total = (total + (token + 1) * pow(BASE, len(prompt) + len(output), 1 << 64)) & MASK
        output.append(token)
        if token == EOS:
            return output, "stop"
