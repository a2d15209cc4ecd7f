"""The worker process around an executor: joins the scheduler, runs its plans, sends results."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from services.worker.executor import Executor, StepOutput
from services.worker.flight import Flight
from shared.codec import no_ids
from shared.errors import WireError
from shared.ids import Identity, new_epoch
from shared.log import LimitedLog
from shared.metrics import Registry
from shared.peers import HEARTBEAT_INTERVAL, SILENCE_LIMIT
from shared.transport import LAST_WORD_MS, Endpoint, Security, connect_dealer
from shared.wire import (
    PROTOCOL_VERSION,
    Fault,
    Goodbye,
    Heartbeat,
    Hello,
    HelloRequired,
    Mask,
    Memory,
    Message,
    Plan,
    PlanRequired,
    Result,
    Welcome,
    checksum,
    decode,
    encode,
)

log = logging.getLogger(__name__)

JOIN_TIMEOUT = 600.0  # seconds to wait for a scheduler
REFUSAL_LIMIT = 10  # HELLOs refused, one a second, before it gives up: a rank whose process died is free again by then
MASK_TIMEOUT = 30.0  # seconds a step waits for its mask
REMIND_EVERY = 30.0  # seconds between log lines while waiting for it
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WAIT_BUCKETS = (0.0001, 0.0002, *STEP_BUCKETS)


class WorkerService:
    """Runs until ``stop`` is called, the scheduler leaves or falls silent, or a step fails; ``run`` gives the code."""

    def __init__(
        self, executor: Executor, rank: int, address: str, security: Security, registry: Registry | None = None
    ) -> None:
        self.epoch = new_epoch()
        self._executor = executor
        self._rank = rank
        self._endpoint = Endpoint(address)
        self._security = security
        self._context = zmq.Context()
        identity = Identity.fresh("worker", rank).encode()
        self._socket = connect_dealer(self._context, identity, self._endpoint.workers, security)
        self._orders: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._joined = False
        self._refusals = 0  # FAULTs since it last was welcome
        self._fault_log, self._malformed_log = LimitedLog(log), LimitedLog(log)
        self._ended: int | None = None
        self._reason = ""
        self._pair = (0, 0)  # the epochs of scheduler and workers that plans must carry
        self._last_step = -1
        self._lost_a_plan = False
        self._later: deque[Plan] = deque()  # plans that came while a step waited for its mask
        self._flight = Flight(executor, self._wake)
        self._registry = registry or Registry()
        self._steps = self._registry.histogram("quire:worker_step_seconds", "Time of a step.", STEP_BUCKETS)
        self._waits = self._registry.histogram(
            "quire:worker_wait_seconds",
            "Time from a step's end to the next one's beginning, idle times too.",
            WAIT_BUCKETS,
        )
        self._free_since: float | None = None  # when the last step ended, unless one has begun since
        self._malformed = self._registry.counter("quire:malformed_messages", "Messages that did not decode or fit.")
        self._stale = self._registry.counter(
            "quire:stale_plans", "Plans of another epoch, and masks of steps that were given up."
        )
        self._pulse = _Pulse(self)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)

    @property
    def joined(self) -> bool:
        return self._joined

    @property
    def last_step(self) -> int:
        return self._last_step

    def stop(self, reason: str, code: int) -> None:
        """Ends the run after the step that runs now, from any thread or signal handler."""
        self._orders.put((reason, code))
        self._wake()

    def run(self) -> int:
        poller = self._poller
        started = due = time.monotonic()
        remind = started + REMIND_EVERY
        self._pulse.start()
        self._executor.begin()
        try:
            while self._ended is None:
                poller.poll(max(0, int((due - time.monotonic()) * 1000) + 1))
                self._obey()
                self._receive()
                self._tell()
                now = time.monotonic()
                if now < due:
                    continue
                due = now + HEARTBEAT_INTERVAL
                self._beat()
                if not self._joined and now >= remind:
                    remind = now + REMIND_EVERY
                    log.warning("still waiting for the scheduler at %s", self._endpoint.workers)
                if not self._joined and now - started > JOIN_TIMEOUT:
                    self._end(f"no scheduler answered at {self._endpoint.workers} in {JOIN_TIMEOUT:.0f} s", 1)
        finally:
            self._close()
        assert self._ended is not None
        return self._ended

    def hello(self, memory: Memory | None) -> Hello:
        return Hello(PROTOCOL_VERSION, "worker", self._rank, self.epoch, pid=os.getpid(), memory=memory)

    def new_socket(self) -> Any:
        """A further DEALER of this rank, for its heartbeat thread."""
        identity = Identity.fresh("worker", self._rank).encode()
        return connect_dealer(self._context, identity, self._endpoint.workers, self._security)

    def _wake(self) -> None:
        """Ends the loop's wait, from any thread."""
        with contextlib.suppress(OSError):  # closed already, or a full pipe of earlier wake-ups
            self._wake_in.send(b"\0")

    # ---- the loop's parts ------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        with contextlib.suppress(queue.Empty):
            self._end(*self._orders.get_nowait())

    def _end(self, reason: str, code: int) -> None:
        if self._ended is None:
            self._ended, self._reason = code, reason
            log.log(logging.ERROR if code else logging.INFO, "ending: %s", reason)

    def _beat(self) -> None:
        if not self._joined:
            self._send(self.hello(self._executor.memory))
            return
        self._send(Heartbeat(self.epoch, max(self._last_step, 0), 0.0, self._registry.snapshot()))

    def _receive(self) -> None:
        while self._ended is None:
            if self._later:
                self._on_plan(self._later.popleft())
            elif not self._receive_one(self._handle):
                return
            self._obey()  # under load the next plan is always here already, so this loop goes on and on

    def _receive_one(self, handle: Callable[[Message], None]) -> bool:
        """Handles a message that is here; whether there was one."""
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return False
        try:
            handle(decode(frames))
        except WireError as error:
            self._malformed.inc()
            self._malformed_log.warning("malformed message from the scheduler: %s", error)
            self._send(Fault(str(error)))
        return True

    def _await_mask(self, plan: Plan) -> Mask | None:
        """The MASK of ``plan``, which the scheduler sends after the result before, and before any later plan.

        None: the process ends, or a plan came instead, so the scheduler has given that step up and drops its result.
        Raises TimeoutError.
        """
        found: list[Mask] = []

        def handle(message: Message) -> None:
            if isinstance(message, Plan):
                self._later.append(message)
            elif isinstance(message, Mask) and _names(message) == _names(plan):
                found.append(message)
            else:
                self._handle(message)

        deadline = time.monotonic() + MASK_TIMEOUT
        while not (found or self._later or self._ended is not None):
            self._tell()  # the step before may still run on its device, and the mask comes after its result
            if not self._receive_one(handle):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"the scheduler sent no mask for it within {MASK_TIMEOUT:g} s")
                self._poller.poll(max(1, int(left * 1000)))
            self._obey()
        return found[0] if found else None

    def _handle(self, message: Message) -> None:
        match message:
            case Plan():
                self._on_plan(message)
            case Heartbeat():
                pass
            case Mask():  # of a step that was given up
                self._stale.inc()
            case Welcome():
                if not self._joined:
                    log.info("joined the scheduler as rank %d", self._rank)
                self._joined, self._refusals = True, 0
                if self._pair[0] != message.epoch:  # a scheduler not seen before; its first plan is a full one
                    self._pair = (message.epoch, 0)
            case HelloRequired():
                self._joined = False
                self._send(self.hello(self._executor.memory))
            case Goodbye():
                why, code = (message.reason, 1) if message.reason else ("it shuts down", 0)
                self._end(f"the scheduler has left: {why}", code)
            case Fault():
                self._on_fault(message)
            case _:
                raise WireError(f"{type(message).__name__} is not for a worker")

    def _on_fault(self, fault: Fault) -> None:
        if self._joined:
            self._fault_log.warning("the scheduler refused a message: %s", fault.message[:500])
            return
        # Before it has joined, all this process sends is HELLO, once a second.
        self._refusals += 1
        if self._refusals == 1:
            log.warning("the scheduler refuses this worker: %s", fault.message[:500])
        elif self._refusals == REFUSAL_LIMIT:
            self._end(f"the scheduler refused this worker {self._refusals} times: {fault.message[:500]}", 1)

    def _on_plan(self, plan: Plan) -> None:
        if plan.full and plan.scheduler_epoch == self._pair[0]:
            self._pair = (plan.scheduler_epoch, plan.worker_epoch)  # rank 0's epoch, which stands for all ranks
            self._lost_a_plan = False
        elif (plan.scheduler_epoch, plan.worker_epoch) != self._pair:
            self._stale.inc()
            return
        elif self._lost_a_plan or plan.step_id != self._last_step + 1:
            if not self._lost_a_plan:
                self._lost_a_plan = True
                log.warning("step %d does not follow step %d; asking for a full plan", plan.step_id, self._last_step)
                self._send(PlanRequired(*self._pair, self._last_step))
            return
        self._last_step = plan.step_id
        if self._free_since is not None:
            self._waits.observe(time.monotonic() - self._free_since)
            self._free_since = None
        self._flight.launch(plan, lambda: self._await_mask(plan))
        self._tell()

    def _tell(self) -> None:
        """Sends the results of steps that are over."""
        while (landed := self._flight.landed()) is not None:
            if self._flight.is_empty:
                self._free_since = time.monotonic()
            if not landed.error:
                self._steps.observe(landed.output.timings["total"])
            self._send(self._result(landed.plan, landed.output, landed.error))

    def _result(self, plan: Plan, output: StepOutput, error: str) -> Result:
        slots, ids, first = output.slots, output.ids, self._rank == 0
        return Result(
            step_id=plan.step_id,
            scheduler_epoch=plan.scheduler_epoch,
            worker_epoch=plan.worker_epoch,
            rank=self._rank,
            checksum=checksum(slots, ids),
            slots=slots if first else no_ids(),
            ids=ids if first else no_ids(),
            timings=output.timings,
            error=error,
            logprobs=output.logprobs if first else None,
            prompt_logprobs=output.prompt_logprobs if first else None,
        )

    def _send(self, message: Message) -> None:
        # A full queue means a scheduler that has not read for very long; its silence ends this process.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(encode(message), zmq.DONTWAIT)

    def _close(self) -> None:
        self._pulse.stop()
        self._flight.close()
        if self._joined:
            failed = self._reason or "it failed"  # without an end of its own, by an exception
            self._send(Goodbye("" if self._ended == 0 else failed))
        self._socket.close(linger=LAST_WORD_MS)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()


def _names(message: Plan | Mask) -> tuple[int, int, int]:
    return message.step_id, message.scheduler_epoch, message.worker_epoch


class _Pulse:
    """The heartbeat thread. A step may take long, so liveness goes over a DEALER of its own.

    It also watches the scheduler: silent for SILENCE_LIMIT, the service is told to end, and if a hung step keeps it
    from that, the process ends here after the same time again.
    """

    def __init__(self, service: WorkerService) -> None:
        self._service = service
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._quit.set()
        self._thread.join(2 * HEARTBEAT_INTERVAL)

    def _run(self) -> None:
        sock = self._service.new_socket()
        welcomed, told = False, 0.0
        heard = checked = time.monotonic()
        while not self._quit.wait(HEARTBEAT_INTERVAL):
            now = time.monotonic()
            lag, checked = max(0.0, now - checked - HEARTBEAT_INTERVAL), now
            while sock.poll(0):
                heard = now
                with contextlib.suppress(WireError):
                    message = decode(sock.recv_multipart())
                    welcomed = isinstance(message, Welcome) or (welcomed and not isinstance(message, HelloRequired))
            if lag > HEARTBEAT_INTERVAL or not self._service.joined:
                heard = now  # this process itself was stopped, or waits for a scheduler
            beat = Heartbeat(self._service.epoch, max(self._service.last_step, 0), lag)
            with contextlib.suppress(zmq.Again):
                sock.send_multipart(encode(beat if welcomed else self._service.hello(None)), zmq.DONTWAIT)
            if told and now - told > SILENCE_LIMIT:
                log.error("step %d still runs and the scheduler is gone", self._service.last_step)
                os._exit(1)
            if not told and now - heard > SILENCE_LIMIT:
                told = now
                self._service.stop(f"the scheduler has been silent for {now - heard:.1f} s", 1)
        sock.close(linger=0)
