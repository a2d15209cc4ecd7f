"""Steps in flight: planned, and not retired yet. What they name is given back when the last of them is retired."""

from __future__ import annotations

from collections import deque

from services.scheduler.host_pool import HostPool
from services.scheduler.request import Sequence
from services.scheduler.steps import Step
from services.scheduler.tables import Tables

MAX_STEPS_IN_FLIGHT = 2


class Flight:
    """``steps``, the oldest first, have consecutive ids up to ``last_step``, the newest that was ever planned."""

    def __init__(self, tables: Tables, host: HostPool) -> None:
        self.steps: deque[Step] = deque()
        self.last_step = 0
        self._tables = tables
        self._host = host

    @property
    def next_step(self) -> int:
        """The id of the step that is planned next, or just now."""
        return self.last_step + 1

    @property
    def is_full(self) -> bool:
        return len(self.steps) >= MAX_STEPS_IN_FLIGHT

    @property
    def gives_back(self) -> bool:
        """Whether retiring what is in flight may make blocks available."""
        return any(step.gives_back for step in self.steps)

    def has(self, step_id: int) -> bool:
        """Whether that step, or the one that is being planned, is not retired yet."""
        return step_id > self.last_step or (bool(self.steps) and step_id >= self.steps[0].step_id)

    def add(self, step: Step) -> None:
        self.last_step = step.step_id
        self.steps.append(step)

    def land(self) -> None:
        """The oldest step is not in flight any more: what it was the last to name is given back."""
        step = self.steps.popleft()
        self._host.release(step.host)
        self._tables.pool.release(step.pins, step.step_id)  # before the tables: a source goes before its parents
        for sequence in step.vacated:
            self._tables.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """A sequence's blocks come back when the last step that names them is retired."""
        if self.has(sequence.fence):
            self._step(sequence.fence).vacated.append(sequence)
        else:
            self._tables.release(sequence)

    def release_host(self, places: list[int], fence: int) -> None:
        """Host blocks come back when step ``fence``, the last that copies to or from them, is retired."""
        if self.has(fence):
            self._step(fence).host.extend(places)
        else:
            self._host.release(places)

    def _step(self, step_id: int) -> Step:
        return self.steps[step_id - self.steps[0].step_id]
