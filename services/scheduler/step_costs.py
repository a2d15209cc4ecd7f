"""What a step takes on this worker, learnt from the steps that have run."""

from __future__ import annotations

import math

FORGET = 0.95  # weight of all earlier observations beside the newest
SEEN = 4  # observations after which one that is far off is not believed at once
FAR_OFF = 3.0  # times what was expected


class Line:
    """y = base + slope * x, neither below 0, by least squares in which older observations count less and less."""

    def __init__(self) -> None:
        self.base = self.slope = 0.0
        self.seen = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def at(self, x: float) -> float:
        return self.base + self.slope * x

    def observe(self, x: float, y: float) -> None:
        if self.seen >= SEEN:  # the machine stood still for a moment; if it is slower now, it will be so again
            y = min(y, FAR_OFF * self.at(x))
        self.seen += 1
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        new = (1.0, x, y, x * x, x * y)
        self._weight, self._x, self._y, self._xx, self._xy = (
            FORGET * before + now for before, now in zip(sums, new, strict=True)
        )
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 1e-6 * (1 + mean_x * mean_x) else 0.0
        self.slope = max(0.0, slope)
        self.base = mean_y - self.slope * mean_x
        if self.base < 0:
            self.base, self.slope = 0.0, self._xy / self._xx


class StepCosts:
    """Seconds of a step, as a sum over its rows.

    Decoding rows together take ``base + slope * rows``: the weights are read once for all of them. A prompt's token
    takes ``base + slope * context``, the context being the tokens before it, which it attends to. What a prompt adds to
    a step of decodes is what the step took beyond its decodes alone.
    """

    def __init__(self) -> None:
        self._decode = Line()  # over rows
        self._token = Line()  # over context

    @property
    def known(self) -> bool:
        """Whether steps of decodes and steps with prompts have both been seen."""
        return bool(self._decode.seen and self._token.seen)

    def observe(self, seconds: float, *, decodes: int, prompt_tokens: int, contexts: float) -> None:
        """A step of ``decodes`` rows and ``prompt_tokens``, whose contexts add up to ``contexts``, took ``seconds``."""
        if prompt_tokens:
            beyond = max(0.0, seconds - self.decodes(decodes))
            self._token.observe(contexts / prompt_tokens, beyond / prompt_tokens)
        elif decodes:
            self._decode.observe(decodes, seconds)

    def decodes(self, rows: int) -> float:
        """Seconds of a step that only decodes."""
        return self._decode.at(rows) if rows else 0.0

    def prompt(self, start: int, count: int) -> float:
        """Seconds that ``count`` tokens of a prompt at positions from ``start`` add to a step."""
        return count * self._token.base + contexts(start, count) * self._token.slope

    def tokens_within(self, seconds: float, start: int) -> int:
        """The most tokens of a prompt at positions from ``start`` that add no more than ``seconds``."""
        square, linear = self._token.slope / 2, self._token.base + self._token.slope * start
        if seconds <= 0 or not (square or linear):
            return 0 if seconds <= 0 else 1 << 30
        # The root of square * n**2 + linear * n = seconds, in the form that stands a square of 0.
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)))

    def status(self) -> dict[str, float]:
        """For /internal/status, in seconds."""
        return {
            "decode_step": self._decode.base,
            "decode_row": self._decode.slope,
            "prompt_token": self._token.base,
            "prompt_token_per_context": self._token.slope,
        }


def contexts(start: int, count: int) -> float:
    """Sum over ``count`` tokens at positions from ``start`` of the tokens before each; half a token more."""
    return count * (start + count / 2)
