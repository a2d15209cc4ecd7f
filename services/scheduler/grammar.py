"""One sequence's grammar: what the next token may be, and which tokens must follow in any case."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shared.grammar import GrammarError, reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

STEP_SECONDS = 0.005  # of processor time that a token and a mask may take each on average; most take 0.02 ms
BURST_SECONDS = 0.5  # that some may take beyond it, all in all: every running request waits for them


class Grammar:
    """Follows an output token by token, as long as that does not take too long.

    forced: tokens that follow the output in any case, in order. They are a function of the output alone, so they are
    the same after a restart, whether they are computed in one go or sampled one by one.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        """``matcher``: at its beginning, and nobody else's. Raises GrammarError as ``take``."""
        self._matcher = matcher
        self._overdrawn = 0.0  # seconds beyond the average
        self.forced: list[int] = []
        self._look_ahead()

    def copy(self) -> Grammar:
        """Another of the same output so far."""
        copy = Grammar.__new__(Grammar)
        copy._matcher, copy._overdrawn, copy.forced = self._matcher.deep_copy(), 0.0, list(self.forced)
        return copy

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow the output and ``forced``."""
        return bool(self._matcher.is_stopped())

    def take(self, token: int) -> None:
        """The output goes on with ``token``. Raises GrammarError when it may not, or the grammar is too complex."""
        if not self.forced:
            begin = time.thread_time()
            if not self._matcher.consume_token(token):
                raise GrammarError(reason_of(self._matcher) or f"token {token} is not allowed")
            self._look_ahead()
            self._charge(time.thread_time() - begin)
        elif token == self.forced[0]:
            del self.forced[0]
            if not self.forced and not self.is_over:
                self._look_ahead()
        else:
            raise GrammarError(f"token {token} is not {self.forced[0]}, which has to follow")

    def allowed(self) -> bytes:
        """A bit for each token that may follow the output and ``forced``, EOS where the output may end there.

        Raises GrammarError when the grammar is too complex.
        """
        begin = time.thread_time()
        bits: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(reason_of(self._matcher))
        self._charge(time.thread_time() - begin)
        return bits

    def _charge(self, seconds: float) -> None:
        self._overdrawn = max(0.0, self._overdrawn - STEP_SECONDS) + seconds
        if self._overdrawn > BURST_SECONDS:
            raise GrammarError(f"its last steps took {self._overdrawn:.2f} s of processor time")

    def _look_ahead(self) -> None:
        self.forced = self._matcher.compute_ff_tokens()
        if self.forced and not self._matcher.consume_tokens(self.forced):
            raise GrammarError(reason_of(self._matcher))
