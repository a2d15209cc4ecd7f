"""Steps that were launched and whose results have not been sent yet, in order."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.executor import Executor, Launched, MaskSource, StepOutput
from shared.codec import no_ids
from shared.wire import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Landed:
    """A step that is over. error: why it failed, empty when it did not."""

    plan: Plan
    output: StepOutput
    error: str


@dataclass(frozen=True, slots=True)
class _NeverBegan:
    problem: Exception

    def done(self) -> bool:
        raise self.problem

    def wait(self) -> None:
        raise self.problem

    def output(self) -> StepOutput:
        raise self.problem


class Flight:
    """On a CPU a step is over when ``launch`` returns. For those that a device still runs a thread waits and calls
    ``wake`` when one is over; so the loop neither waits nor polls, and can launch a next plan meanwhile."""

    def __init__(self, executor: Executor, wake: Callable[[], None]) -> None:
        self._executor, self._wake = executor, wake
        self._steps: deque[tuple[Plan, Launched]] = deque()
        self._running: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        return not self._steps

    def launch(self, plan: Plan, mask: MaskSource) -> None:
        step: Launched
        try:
            step = self._executor.launch(plan, mask)
        except Exception as problem:
            step = _NeverBegan(problem)
        self._steps.append((plan, step))
        if not _over(step):
            self._await(step)

    def landed(self) -> Landed | None:
        """The oldest step, taken out, if it is over."""
        if not self._steps or not _over(self._steps[0][1]):
            return None
        plan, step = self._steps.popleft()
        try:
            return Landed(plan, step.output(), "")
        except Exception as problem:
            log.error("step %d failed", plan.step_id, exc_info=problem)
            return Landed(plan, StepOutput(no_ids(), no_ids()), f"{type(problem).__name__}: {problem}")

    def close(self) -> None:
        """The thread ends with the step it waits for; nobody waits for the thread, which a hung device may hold."""
        self._running.put(None)

    def _await(self, step: Launched) -> None:
        self._running.put(step)
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="steps", daemon=True)
            self._thread.start()

    def _wait(self) -> None:
        while (step := self._running.get()) is not None:
            with contextlib.suppress(Exception):  # the loop meets it when it asks for the output
                step.wait()
            self._wake()


def _over(step: Launched) -> bool:
    """Whether it has ended or failed."""
    try:
        return step.done()
    except Exception:
        return True
