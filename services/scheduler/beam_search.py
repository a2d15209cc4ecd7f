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

from shared.sampling import SamplingParams

Candidates = Sequence[tuple[int, float]]
"""Token ids and logprobs that a beam may go on with, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A beam of the next step: token after beam ``parent``, and its cumulative logprob."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    worth: float
    cumulative: float
    tokens: list[int]


@dataclass(slots=True)
class BeamSearch:
    """``width`` beams, one before the first step. ``stop_ids`` end a hypothesis, ``max_tokens`` the search."""

    width: int
    max_tokens: int
    stop_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: str = "false"
    hypotheses: list[Hypothesis] = field(default_factory=list)  # the best first
    done: bool = False
    _scores: list[float] = field(default_factory=lambda: [0.0])
    _length: int = 0

    @classmethod
    def of(cls, sampling: SamplingParams, max_tokens: int, stop_ids: frozenset[int]) -> BeamSearch:
        return cls(sampling.n, max_tokens, stop_ids, sampling.length_penalty, sampling.early_stopping)

    @property
    def candidates(self) -> int:
        """How many of its likeliest tokens each beam has to offer, so that ``width`` of all go on whatever ends."""
        return self.width + len(self.stop_ids)

    def advance(self, offers: Sequence[Candidates], outputs: Sequence[list[int]]) -> list[Fork]:
        """One step: ``offers[b]`` goes on after the tokens ``outputs[b]`` of beam b. Returns the beams that live on.

        Sets ``done``, and adds to ``hypotheses``; then what it returns does not matter.
        """
        forks = [
            Fork(beam, token, score + logprob)
            for beam, (score, offer) in enumerate(zip(self._scores, offers, strict=True))
            for token, logprob in offer
        ]
        forks.sort(key=lambda fork: -fork.score)
        self._length += 1
        last = self._length == self.max_tokens
        for fork in forks[: self.width]:
            if last or fork.token in self.stop_ids:
                worth = worth_of(fork.score, self._length, self.length_penalty)
                self.hypotheses.append(Hypothesis(worth, fork.score, [*outputs[fork.parent], fork.token]))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.worth)
        del self.hypotheses[self.width :]
        beams = [] if last else [fork for fork in forks if fork.token not in self.stop_ids][: self.width]
        self._scores = [fork.score for fork in beams]
        full = len(self.hypotheses) == self.width
        self.done = not beams or (full and (self.early_stopping == "true" or not self._can_improve()))
        return beams

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
