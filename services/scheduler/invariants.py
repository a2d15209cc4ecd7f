"""What must hold between any two calls of the scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.flight import MAX_STEPS_IN_FLIGHT
from services.scheduler.request import Sequence, State
from services.scheduler.scheduler import Scheduler


class Audit:
    """Checks a scheduler that has become idle, once after each time that it worked. Reports, and changes nothing.

    It goes on slice by slice, each well below a millisecond, and starts over when a step comes in between.
    """

    def __init__(self) -> None:
        self._checked = 0  # the last step before the check that is under way, or was the last
        self._slices: Iterator[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._slices is not None

    def begin(self, scheduler: Scheduler) -> None:
        """Starts a check, if it is the time for one."""
        if self._slices is None and _is_idle(scheduler) and scheduler.last_step != self._checked:
            self._checked, self._slices = scheduler.last_step, slices(scheduler)

    def go_on(self, scheduler: Scheduler) -> str:
        """One slice of the check under way. What is wrong; empty when nothing is, as far as has been looked."""
        assert self._slices is not None
        try:
            if not _is_idle(scheduler) or scheduler.last_step != self._checked:
                self._slices, self._checked = None, 0
            else:
                next(self._slices)
        except StopIteration:
            self._slices = None
        except AssertionError as error:
            self._slices = None
            return str(error) or "an invariant does not hold"
        return ""


def _is_idle(scheduler: Scheduler) -> bool:
    return not (scheduler.steps or scheduler.rows.num_used or scheduler.queues.num_waiting)


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError when blocks, tables, slots, queues and steps contradict one another."""
    for _ in slices(scheduler):
        pass


def slices(scheduler: Scheduler) -> Iterator[None]:
    """``check``, bit by bit. What it looks at must not change before its end."""
    requests, rows, steps, limits = scheduler.streams.requests, scheduler.rows, scheduler.steps, scheduler.limits
    queues = scheduler.queues
    sequences = [sequence for request in requests.values() for sequence in request.sequences]
    leaving = {sequence for step in steps for sequence in step.vacated} | set(scheduler.swaps.leaving)
    yield from scheduler.swaps.host.audit([*(one.host for one in sequences), *(step.host for step in steps)])
    holders = {sequence for sequence in sequences if sequence.blocks} | leaving
    pins = [(step.step_id, step.pins) for step in steps]
    yield from scheduler.tables.audit([*((sequence, sequence.blocks) for sequence in holders), *pins])
    assert len(steps) <= MAX_STEPS_IN_FLIGHT

    occupants = rows.occupants()
    by_state: dict[State, set[Sequence]] = {state: set() for state in State}
    for sequence in sequences:
        by_state[sequence.state].add(sequence)
    assert by_state[State.PREFILL] | by_state[State.DECODE] == set(occupants)
    assert by_state[State.PREFILL] == set(queues.prefilling)
    assert by_state[State.PREEMPTED] == set(queues.preempted)
    assert by_state[State.WAITING] == set(queues.waiting)
    places = [sequence for leader in queues.waiting for sequence in (leader, *leader.forks)]
    assert len(queues.waiting) == len(places)
    assert queues.waiting.tokens == sum(len(sequence.request.prompt) for sequence in places)
    assert by_state[State.FORK] == {fork for sequence in sequences for fork in sequence.forks}
    in_flight = {sequence for step in steps for sequence in step.sequences}
    assert by_state[State.DRAIN] <= in_flight, "a draining sequence waits for no step"
    assert set(scheduler.streams.unacknowledged) == {r.rid for r in requests.values() if r.done is not None}

    for sequence in sequences:
        assert (sequence.finished is not None) == (sequence.state is State.FINISHED)
        if sequence.state is State.BEAM:
            assert sequence.slot < 0, "a beam keeps its slot"
        else:
            assert bool(sequence.blocks) == (sequence.slot >= 0 or sequence in leaving), "blocks without a slot"
        assert len(sequence.output) <= sequence.request.max_tokens
    for sequence in occupants:
        slot, decoding = sequence.slot, bool(rows.decoding[sequence.slot])
        assert rows.sequences[slot] is sequence
        assert decoding == (sequence.state is State.DECODE)
        length = int(rows.length[slot]) if decoding else sequence.computed
        assert len(sequence.blocks) == limits.blocks_for(length), "more or fewer blocks than its tokens need"
        assert length < limits.max_model_len
