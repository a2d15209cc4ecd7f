"""What executes plans: the model on a device, or the null worker's toy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shared.codec import Int32
from shared.wire import Logprobs, Mask, Memory, Plan

MaskSource = Callable[[], Mask | None]
"""Waits, boundedly, for the MASK of the step that is launched; None: it will not come, as nobody wants the result."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Entry i: token ``ids[i]`` was sampled into slot ``slots[i]`` (order: docs/protocol.md), -1 for none. timings in
    seconds.

    logprobs: of the entries whose rows asked, and of prompt tokens, as in ``Result``; None when no row did.
    """

    slots: Int32
    ids: Int32
    timings: dict[str, float] = field(default_factory=dict)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class Launched(Protocol):
    """A step that has begun. Steps end in the order in which they began."""

    def done(self) -> bool:
        """Whether it has ended. Raises what went wrong on the device; so do ``wait`` and ``output``."""
        ...

    def wait(self) -> None:
        """Returns when it has ended; any thread may wait."""
        ...

    def output(self) -> StepOutput:
        """Of a step that has ended; called once, by the thread that launches."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that was over when it was launched."""

    result: StepOutput

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def output(self) -> StepOutput:
        return self.result


class Executor(Protocol):
    """Owns weights and KV of one rank. Makes no policy: no EOS check, no allocation."""

    @property
    def memory(self) -> Memory:
        """What this rank offers; constant after construction."""
        ...

    def begin(self) -> None:
        """Called once, by the thread that will launch, before the first step."""
        ...

    def launch(self, plan: Plan, mask: MaskSource) -> Launched:
        """Begins the step of a plan; the one before need not have ended.

        ``mask`` is called once, between forward pass and sampling, if masked rows sample. Raises PlanError when the
        plan or the mask contradicts the rows it names.
        """
        ...


class PlanError(Exception):
    """The plan cannot be right: an unknown slot, a table too short, a wrong count of decodes."""


def no_mask() -> Mask | None:
    """For plans without masked rows."""
    raise PlanError("masked rows sample in a step that has no mask")
