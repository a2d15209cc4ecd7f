"""How much a step may compute: tokens, and the time that prompts may take from running streams."""

from __future__ import annotations

import math

from services.scheduler.limits import Limits
from services.scheduler.step_costs import StepCosts, contexts

STRETCH = 0.75  # of the decodes' own time, that each prompt may add to a step
AT_LEAST = 0.002  # seconds that may be added anyway: so short a gap between tokens is no stall
LEAST = 8  # tokens of a chunk: its context has to be read whatever their number
TOGETHER = 0.5  # seconds of prompts in one step, however many there are: matrix products run at full speed then


class Budget:
    """What is left of one step. Prompts take their chunks in turn; each leaves half to those after it, if any wait.

    So the first in line is never starved, and a short prompt gets through beside long ones that came before it.
    """

    def __init__(self, costs: StepCosts, block_size: int, tokens: int, seconds: float, prompts: int) -> None:
        """seconds: of all prompts' chunks together. prompts: how many want one."""
        self.tokens = tokens
        self.prompt_tokens = 0  # taken,
        self.contexts = 0.0  # and the sum of their contexts
        self._costs = costs
        self._block_size = block_size
        self._seconds = seconds
        self._prompts = prompts
        self._refused = False

    @property
    def is_spent(self) -> bool:
        """Whether no further prompt can have a chunk, or one could not that is before it in line."""
        if self._refused or self.tokens <= 0:
            return True
        return bool(self.prompt_tokens) and self._costs.prompt(0, self._block_size) > self._seconds

    def chunk(self, start: int, wanted: int) -> int:
        """How many of the ``wanted`` tokens of a prompt from ``start`` on may be computed.

        A chunk that time cuts short ends with a block. The first of a step is a block at least, whatever it takes, but
        where only its context makes that too long: then it is what there is time for, and LEAST in any case. (Matrix
        products of fewer tokens take as long, attention does not.) A single token is as good as a decode.
        """
        most = max(0, min(self.tokens, wanted))
        if math.isinf(self._seconds) or wanted == 1:
            return most
        share = self._seconds / 2 if self._prompts > 1 else self._seconds
        count = self._costs.tokens_within(share, start)
        if count < wanted:
            count -= (start + count) % self._block_size
        if count <= 0:
            block = min(wanted, self._block_size - start % self._block_size)
            if self._costs.prompt(start, block) <= self._seconds:
                count = block
            elif not self.prompt_tokens:
                is_context = self._costs.prompt(0, block) <= self._seconds
                count = min(block, max(LEAST, self._costs.tokens_within(self._seconds, start))) if is_context else block
        count = max(0, min(count, most))
        self._refused |= count < min(wanted, 1)
        return count

    def spend(self, start: int, count: int) -> None:
        """A chunk was taken."""
        self.tokens -= count
        self.prompt_tokens += count
        self.contexts += contexts(start, count)
        self._seconds -= self._costs.prompt(start, count)
        self._prompts -= 1


class Budgets:
    """Makes the budget of each step. ``Limits.max_step``: see ``--max-step-ms``."""

    def __init__(self, limits: Limits, costs: StepCosts) -> None:
        self._limits = limits
        self._costs = costs

    def make(self, decodes: int, prompts: int) -> Budget:
        """decodes: rows that are planned already. prompts: how many have a row, or could have one now."""
        tokens = self._limits.max_num_batched_tokens - decodes
        return Budget(self._costs, self._limits.block_size, tokens, self._seconds(decodes, prompts), prompts)

    def _seconds(self, decodes: int, prompts: int) -> float:
        """What prompts may add to a step.

        Of its own accord: a share of the decodes' time for each of them. One among many streams so takes hardly
        anything from them, while many, whose tokens the batch lacks, take what they need to catch up. With nobody
        decoding there is nobody to stall; the limit is then for those who will come next.
        """
        limit = self._limits.max_step
        if limit == 0 or not self._costs.known:
            return math.inf
        alone = self._costs.decodes(decodes)
        if not decodes:
            return max(TOGETHER, limit or 0.0)
        if limit is not None:
            return limit - alone
        each = max(STRETCH * alone, AT_LEAST)
        return max(each, min(each * prompts, TOGETHER))
