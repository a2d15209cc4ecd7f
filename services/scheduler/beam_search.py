"""The search of one request with ``use_beam_search``: which beams live on, and which hypotheses are the answer.

The rules are those of transformers' ``generate(num_beams=n, do_sample=False)``, of which this is another writing: a
hypothesis is worth its cumulative logprob over its length to the power of ``length_penalty``; with ``early_stopping``
"true" the search ends with n hypotheses, with "false" when the best beam, at its present length, cannot beat the worst
of them, and with "never" when it could not at the best length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.logprobs import Found
from shared.sampling import SamplingParams

Candidates = Sequence[tuple[int, float]]
"""Token ids and logprobs that a beam may go on with, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens of an output, and what is told of each, where it is."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Found] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fork:
    """A beam of the next step, which goes on from beam ``parent``: its output and its cumulative logprob."""

    parent: int
    score: float
    output: Output


@dataclass(frozen=True, slots=True)
class Hypothesis:
    worth: float
    cumulative: float
    output: Output


@dataclass(frozen=True, slots=True)
class _Choice:
    """Place ``place`` in the offer of beam ``beam``."""

    beam: int
    place: int
    token: int
    score: float


@dataclass(slots=True)
class BeamSearch:
    """``width`` beams, one before the first step. ``stop_ids`` end a hypothesis, ``max_tokens`` the search.

    told: likeliest tokens whose logprobs are told beside each token's; -1: none are, nor its own.
    """

    width: int
    max_tokens: int
    stop_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: str = "false"
    told: int = -1
    hypotheses: list[Hypothesis] = field(default_factory=list)  # the best first
    done: bool = False
    _scores: list[float] = field(default_factory=lambda: [0.0])
    _length: int = 0

    @classmethod
    def of(cls, sampling: SamplingParams, max_tokens: int, stop_ids: frozenset[int]) -> BeamSearch:
        return cls(
            sampling.n, max_tokens, stop_ids, sampling.length_penalty, sampling.early_stopping, sampling.logprobs
        )

    @property
    def candidates(self) -> int:
        """How many of its likeliest tokens each beam has to offer, so that ``width`` of all go on whatever ends."""
        return max(self.width + len(self.stop_ids), self.told)

    def advance(self, offers: Sequence[Candidates], outputs: Sequence[Output]) -> list[Fork]:
        """One step: ``offers[b]`` goes on after ``outputs[b]`` of beam b. Returns the beams that live on.

        Sets ``done``, and adds to ``hypotheses``; then what it returns does not matter.
        """
        choices = [
            _Choice(beam, place, token, score + logprob)
            for beam, (score, offer) in enumerate(zip(self._scores, offers, strict=True))
            for place, (token, logprob) in enumerate(offer)
        ]
        choices.sort(key=lambda choice: -choice.score)
        self._length += 1
        last = self._length == self.max_tokens
        for choice in choices[: self.width]:
            if last or choice.token in self.stop_ids:
                worth = worth_of(choice.score, self._length, self.length_penalty)
                output = self._output(choice, offers, outputs)
                self.hypotheses.append(Hypothesis(worth, choice.score, output))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.worth)
        del self.hypotheses[self.width :]
        beams = [] if last else [choice for choice in choices if choice.token not in self.stop_ids][: self.width]
        self._scores = [choice.score for choice in beams]
        full = len(self.hypotheses) == self.width
        self.done = not beams or (full and (self.early_stopping == "true" or not self._can_improve()))
        return [Fork(choice.beam, choice.score, self._output(choice, offers, outputs)) for choice in beams]

    def _output(self, choice: _Choice, offers: Sequence[Candidates], outputs: Sequence[Output]) -> Output:
        before, offer = outputs[choice.beam], offers[choice.beam]
        tokens = [*before.tokens, choice.token]
        if self.told < 0:
            return Output(tokens)
        _, logprob = offer[choice.place]
        rank = 1 + sum(other > logprob for _, other in offer[: choice.place])
        ids, values = [token for token, _ in offer[: self.told]], [value for _, value in offer[: self.told]]
        return Output(tokens, [*before.logprobs, (logprob, rank, ids, values)])

    def _can_improve(self) -> bool:
        longest = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if longest else self._length
        return worth_of(self._scores[0], length, self.length_penalty) > self.hypotheses[-1].worth


def worth_of(score: float, length: int, length_penalty: float) -> float:
    """``score / length ** length_penalty`` for a score of at most 0, with the limits where the power has no float."""
    try:
        return score / float(length**length_penalty)
    except OverflowError:
        return -0.0
    except ZeroDivisionError:
        return -math.inf if score else 0.0
