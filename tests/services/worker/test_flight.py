"""Steps that a device runs while the loop goes on, in the worker process against a raw ROUTER."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from services.worker.executor import MaskSource, StepOutput
from shared.codec import int32
from shared.wire import Mask, Memory, NewRow, Plan, Result
from tests.services.worker.test_null import EMPTY
from tests.services.worker.test_service import EPOCH, GROUP, FakeScheduler


@dataclass
class SlowStep:
    """Runs until ``over`` is set; fails with ``problem``."""

    number: int
    problem: Exception | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        if self.over.is_set() and self.problem:
            raise self.problem
        return self.over.is_set()

    def wait(self) -> None:
        assert self.over.wait(20)
        if self.problem:
            raise self.problem

    def output(self) -> StepOutput:
        self.wait()
        return StepOutput(int32([0]), int32([self.number]), {"total": 0.001})


class SlowDevice:
    """Launches at once; the test ends steps."""

    memory = Memory(4, 0, 16, 1, 16, 50, [2], "")

    def __init__(self) -> None:
        self.steps: list[SlowStep] = []
        self.launched = threading.Semaphore(0)
        self.fails: Exception | None = None

    def begin(self) -> None:
        pass

    def launch(self, plan: Plan, mask: MaskSource) -> SlowStep:
        if plan.decodes:
            raise ValueError("it cannot begin")
        if plan.new_rows:
            assert mask() is not None
        self.steps.append(SlowStep(plan.step_id, self.fails))
        self.launched.release()
        return self.steps[-1]


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


@pytest.fixture
def scheduler(tmp_path: Path, device: SlowDevice) -> Iterator[FakeScheduler]:
    fake = FakeScheduler(tmp_path, device, 0)
    fake.welcome()
    yield fake
    for step in device.steps:
        step.over.set()
    fake.close()


def send(scheduler: FakeScheduler, step_id: int, **changes: object) -> None:
    values = {"step_id": step_id, "scheduler_epoch": EPOCH, "worker_epoch": GROUP, "full": step_id == 1}
    scheduler.send(replace(EMPTY, **(values | changes)))  # type: ignore[arg-type]


def test_the_next_step_is_launched_while_one_runs(scheduler: FakeScheduler, device: SlowDevice) -> None:
    for number in (1, 2):
        send(scheduler, number)
        assert device.launched.acquire(timeout=10)
    device.steps[1].over.set()  # a result never goes before an earlier one's
    device.steps[0].over.set()
    results: list[Result] = [scheduler.receive(Result) for _ in range(2)]
    assert [(result.step_id, result.ids.tolist()) for result in results] == [(1, [1]), (2, [2])]


def test_a_step_that_fails_on_the_device_is_told_with_its_error(scheduler: FakeScheduler, device: SlowDevice) -> None:
    device.fails = RuntimeError("illegal memory access")
    send(scheduler, 1)
    assert device.launched.acquire(timeout=10)
    device.steps[0].over.set()
    assert scheduler.receive(Result).error == "RuntimeError: illegal memory access"


def test_a_step_that_cannot_begin_is_told_after_the_one_before(scheduler: FakeScheduler, device: SlowDevice) -> None:
    send(scheduler, 1)
    assert device.launched.acquire(timeout=10)
    send(scheduler, 2, decodes=1)
    device.steps[0].over.set()
    results: list[Result] = [scheduler.receive(Result) for _ in range(2)]
    assert [(result.step_id, result.error) for result in results] == [(1, ""), (2, "ValueError: it cannot begin")]


def test_a_launch_that_waits_for_its_mask_lets_the_result_before_go(
    scheduler: FakeScheduler, device: SlowDevice
) -> None:
    """The mask depends on that result, so neither would ever come."""
    send(scheduler, 1)
    assert device.launched.acquire(timeout=10)
    send(scheduler, 2, new_rows=[NewRow(0, 0, 0, 0.0, 1.0, 0, 0.0, 0, masked=True)])
    assert not device.launched.acquire(timeout=0.3)
    device.steps[0].over.set()
    assert scheduler.receive(Result).step_id == 1
    scheduler.send(Mask(2, EPOCH, GROUP, [], int32([])))
    assert device.launched.acquire(timeout=10)
    device.steps[1].over.set()
    assert scheduler.receive(Result).step_id == 2
