"""The worker process's side of the plan protocol, against a raw ROUTER that plays the scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from services.worker.executor import Executor
from services.worker.service import WorkerService
from shared.codec import int32
from shared.ids import Identity
from shared.transport import Security, bind_router
from shared.wire import (
    Fault,
    Goodbye,
    Heartbeat,
    Hello,
    HelloRequired,
    Mask,
    PlanRequired,
    Result,
    Welcome,
    checksum,
    decode,
    encode,
)
from tests.services.scheduler.simulation import toy_output
from tests.services.worker.test_null import EMPTY, executor, prefill
from tests.services.worker.test_null import decode as decode_plan

EPOCH, GROUP = 77, 55


class FakeScheduler:
    """A ROUTER at the workers' address, and the worker under test in a thread of its own."""

    def __init__(self, folder: Path, executor: Executor, rank: int) -> None:
        self._context = zmq.Context()
        self._router, _ = bind_router(self._context, f"ipc://{folder}/workers", Security())
        self.worker = WorkerService(executor, rank, f"ipc://{folder}", Security())
        self.code: list[int] = []
        self._thread = threading.Thread(target=lambda: self.code.append(self.worker.run()))
        self._thread.start()
        self.rank = b""

    def receive(self, kind: type[Any], patience: float = 10.0) -> Any:
        """The next message of a kind, with who sent it remembered; other kinds are dropped."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self._router.poll(100):
                raw, *frames = self._router.recv_multipart()
                message = decode(frames)
                if isinstance(message, kind):
                    self.sender = raw
                    return message
        raise AssertionError(f"no {kind.__name__}")

    def send(self, message: Any, to: bytes | None = None) -> None:
        self._router.send_multipart([to or self.rank, *encode(message)])

    def send_raw(self, *frames: bytes) -> None:
        self._router.send_multipart([self.rank, *frames])

    def welcome(self) -> Hello:
        while True:
            hello: Hello = self.receive(Hello)
            if hello.memory is not None:
                self.rank = self.sender
                self.send(Welcome(EPOCH, 0, 4, 16, 40, 64, [2], "null"))
                return hello

    def step(self, plan: Any, step_id: int) -> Result:
        self.send(replace(plan, step_id=step_id, scheduler_epoch=EPOCH, worker_epoch=GROUP))
        result: Result = self.receive(Result)
        return result

    def join(self, patience: float = 10.0) -> int:
        self._thread.join(patience)
        assert not self._thread.is_alive(), "the worker did not end"
        return self.code[0]

    def close(self) -> None:
        self.worker.stop("the test is over", 0)
        self._thread.join(10)
        self._router.close(0)
        self._context.term()


@pytest.fixture(params=[0])
def scheduler(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeScheduler]:
    fake = FakeScheduler(tmp_path, executor(), request.param)
    yield fake
    fake.close()


def test_hello_carries_the_memory_and_the_heartbeat_thread_the_same_epoch(scheduler: FakeScheduler) -> None:
    hello = scheduler.welcome()
    assert hello.memory == executor().memory
    assert Identity.decode(scheduler.rank).index == 0
    other = scheduler.receive(Hello)
    assert other.memory is None
    assert other.epoch == hello.epoch
    assert scheduler.sender != scheduler.rank
    pulse = scheduler.sender
    scheduler.send(Welcome(EPOCH, 0, 4, 16, 40, 64, [2], "null"), to=pulse)
    while scheduler.receive(Heartbeat) and scheduler.sender != pulse:
        pass


def test_results_carry_epochs_checksum_and_ids(scheduler: FakeScheduler) -> None:
    scheduler.welcome()
    result = scheduler.step(prefill(2, [7, 8], [3], full=True), 1)
    assert (result.step_id, result.scheduler_epoch, result.worker_epoch, result.rank) == (1, EPOCH, GROUP, 0)
    assert (result.slots.tolist(), result.ids.tolist()) == ([2], toy_output([7, 8], 1))
    assert result.checksum == checksum(result.slots, result.ids)
    assert result.timings["total"] > 0
    assert scheduler.step(decode_plan(1), 2).ids.tolist() == toy_output([7, 8], 2)[1:]


def test_what_it_waits_for_plans_is_counted(scheduler: FakeScheduler) -> None:
    """Between two steps lies at least the time from one's result to the other's plan."""
    scheduler.welcome()
    begun, pauses = time.monotonic(), 0.0
    scheduler.step(prefill(2, [7, 8], [3], full=True), 1)
    for step_id in (2, 3, 4):
        came = time.monotonic()
        time.sleep(0.01)
        pauses += time.monotonic() - came
        scheduler.step(decode_plan(1), step_id)
    took = time.monotonic() - begun
    while not (beat := scheduler.receive(Heartbeat)).metrics:
        pass
    counts, total = beat.metrics["quire:worker_wait_seconds"][3]
    assert sum(counts) == 3
    assert pauses <= total <= took


@pytest.mark.parametrize("scheduler", [1], indirect=True)
def test_a_later_rank_sends_the_checksum_alone(scheduler: FakeScheduler) -> None:
    scheduler.welcome()
    result = scheduler.step(prefill(2, [7, 8], [3], full=True), 1)
    assert (result.rank, len(result.slots), len(result.ids)) == (1, 0, 0)
    output = executor().execute(prefill(2, [7, 8], [3]))
    assert result.checksum == checksum(output.slots, output.ids)


def test_a_gap_asks_once_for_a_full_plan(scheduler: FakeScheduler) -> None:
    scheduler.welcome()
    scheduler.step(prefill(0, [7, 8], [3], full=True), 1)
    for step_id in (3, 4):
        scheduler.send(replace(decode_plan(1), step_id=step_id, scheduler_epoch=EPOCH, worker_epoch=GROUP))
    required = scheduler.receive(PlanRequired)
    assert (required.scheduler_epoch, required.worker_epoch, required.last_step) == (EPOCH, GROUP, 1)
    result = scheduler.step(prefill(0, [7, 8], [3], full=True), 5)
    assert (result.step_id, result.ids.tolist()) == (5, toy_output([7, 8], 1))


def test_plans_of_other_epochs_are_dropped(scheduler: FakeScheduler) -> None:
    scheduler.welcome()
    scheduler.step(prefill(0, [7, 8], [3], full=True), 1)
    scheduler.send(replace(decode_plan(1), step_id=2, scheduler_epoch=EPOCH, worker_epoch=GROUP + 1))
    scheduler.send(replace(EMPTY, step_id=2, scheduler_epoch=EPOCH - 1, worker_epoch=GROUP, full=True))
    result = scheduler.step(decode_plan(1), 2)
    assert (result.step_id, result.error, len(result.ids)) == (2, "", 1)


def test_a_wrong_plan_is_a_result_with_error(scheduler: FakeScheduler) -> None:
    scheduler.welcome()
    result = scheduler.step(decode_plan(3, full=True), 1)
    assert result.error == "PlanError: the plan counts 3 decoding rows; there are 0"


def test_garbage_is_answered_and_hello_repeated_when_asked(scheduler: FakeScheduler) -> None:
    scheduler.welcome()
    scheduler.send_raw(b"\x63\x01", b"\x90")
    assert "unknown message kind 99" in scheduler.receive(Fault).message
    scheduler.send(HelloRequired(EPOCH + 1))
    scheduler.welcome()
    assert scheduler.step(prefill(0, [7, 8], [3], full=True), 1).ids.tolist() == toy_output([7, 8], 1)


@pytest.mark.parametrize(("reason", "code"), [("", 0), ("worker rank 1 has left", 1)])
def test_goodbye_both_ways(scheduler: FakeScheduler, reason: str, code: int) -> None:
    scheduler.welcome()
    scheduler.step(prefill(0, [7, 8], [3], full=True), 1)
    scheduler.send(Goodbye(reason))
    assert scheduler.receive(Goodbye).reason == (f"the scheduler has left: {reason}" if reason else "")
    assert scheduler.join() == code


def test_a_silent_scheduler_ends_the_worker(scheduler: FakeScheduler) -> None:
    scheduler.welcome()
    assert scheduler.join() == 1


def test_a_worker_refused_again_and_again_ends(scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture) -> None:
    while scheduler.receive(Hello).memory is None:
        pass
    for _ in range(10):
        scheduler.send(Fault("worker rank 0 is here already"), to=scheduler.sender)
    assert scheduler.join() == 1
    assert [line for line in caplog.messages if "refuse" in line] == [
        "the scheduler refuses this worker: worker rank 0 is here already",
        "ending: the scheduler refused this worker 10 times: worker rank 0 is here already",
    ]


def masked_prefill(step_id: int) -> Any:
    plan = prefill(2, [7, 8], [3], full=True)
    rows = [replace(row, masked=True) for row in plan.new_rows]
    return replace(plan, step_id=step_id, scheduler_epoch=EPOCH, worker_epoch=GROUP, new_rows=rows)


def only(token: int, step_id: int, epoch: int = EPOCH) -> Mask:
    return Mask(step_id, epoch, GROUP, [2], int32([1 << token % 32 if word == token // 32 else 0 for word in range(2)]))


def test_a_step_with_masked_rows_waits_for_its_mask(scheduler: FakeScheduler) -> None:
    """Whatever else comes meanwhile: heartbeats, masks of other steps, bytes that are no message."""
    scheduler.welcome()
    scheduler.send(masked_prefill(1))
    for other in (Heartbeat(EPOCH, 0, 0.0), only(5, 7), only(5, 1, EPOCH + 1)):
        scheduler.send(other)
    scheduler.send_raw(b"\xff\x01", b"")
    assert "unknown" in scheduler.receive(Fault).message
    with pytest.raises(AssertionError, match="no Result"):
        scheduler.receive(Result, patience=0.3)
    scheduler.send(only(40, 1))
    assert scheduler.receive(Result).ids.tolist() == [40]


def test_a_full_plan_instead_of_a_mask_means_that_the_step_was_given_up(scheduler: FakeScheduler) -> None:
    scheduler.welcome()
    scheduler.send(masked_prefill(1))
    scheduler.send(masked_prefill(2))
    assert scheduler.receive(Result).step_id == 1  # of no use to anybody
    scheduler.send(only(41, 2))
    result = scheduler.receive(Result)
    assert (result.step_id, result.ids.tolist(), result.error) == (2, [41], "")


def test_a_mask_that_does_not_come_is_named(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.service.MASK_TIMEOUT", 0.2)
    scheduler.welcome()
    scheduler.send(masked_prefill(1))
    assert "sent no mask for it within 0.2 s" in scheduler.receive(Result).error


def test_the_end_does_not_wait_for_a_mask(scheduler: FakeScheduler) -> None:
    scheduler.welcome()
    scheduler.send(masked_prefill(1))
    scheduler.send(Goodbye(""))
    assert scheduler.join() == 0
