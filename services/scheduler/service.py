"""The scheduler process: two ROUTERs and one poller; only grammars are built beside it, in a thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import time
from collections.abc import Callable

import zmq

from services.scheduler import reports
from services.scheduler.config import SchedulerConfig
from services.scheduler.grammar import Grammar
from services.scheduler.grammars import Grammars
from services.scheduler.invariants import Audit
from services.scheduler.ledger import filled_slots
from services.scheduler.limits import Limits
from services.scheduler.plan_log import PlanLog
from services.scheduler.port import Port, Traffic
from services.scheduler.ranks import RankError, Ranks
from services.scheduler.roster import ClientNumbers, LiveTokenizers, check_tokenizer
from services.scheduler.scheduler import Scheduler, StepError
from services.scheduler.stats import Stats
from shared import options
from shared.errors import ConfigError, RequestError, WireError
from shared.grammar import GrammarError
from shared.ids import new_epoch
from shared.peers import HEARTBEAT_INTERVAL, SILENCE_LIMIT, Peer
from shared.transport import Endpoint, bind_router, start_zap
from shared.wire import (
    Ack,
    Cancel,
    Goodbye,
    Heartbeat,
    Hello,
    Mask,
    Memory,
    Plan,
    PlanRequired,
    Query,
    Reject,
    Result,
    Resume,
    Stop,
    SubmitTokens,
    Welcome,
    encode,
)

log = logging.getLogger(__name__)


class SchedulerService:
    """Runs until ``stop`` is called, a worker fails, or an error ends it; ``run`` returns the exit code."""

    def __init__(self, config: SchedulerConfig, beat: Callable[[], None]) -> None:
        """``beat`` is called about once a second, from the loop itself: how the launcher sees that it goes round."""
        self._beat = beat
        self.epoch = new_epoch()
        self._config = config
        self._plan_log = PlanLog(config.plan_log) if config.plan_log else None
        endpoint, security = Endpoint(config.bind), options.security(config)
        self._context = zmq.Context()
        self._zap = start_zap(self._context, security)
        self._traffic = Traffic()
        clients, clients_address = bind_router(self._context, endpoint.clients, security)
        workers, workers_address = bind_router(self._context, endpoint.workers, security)
        self._clients = Port(
            clients,
            self.epoch,
            self._traffic,
            {
                Heartbeat: lambda peer, message: self._clients.peers.beat(peer, message),
                Goodbye: lambda peer, message: self._lose_client(peer, "has left"),
                SubmitTokens: self._on_submit,
                Cancel: lambda peer, message: self._core_for(peer).cancel(message.rid),
                Stop: lambda peer, message: self._core_for(peer).stop(message.rid, message.seq, message.keep),
                Resume: lambda peer, message: self._core_for(peer).streams.resume(
                    peer.raw, message.rid, message.seq, message.offset
                ),
                Ack: lambda peer, message: self._core_for(peer).streams.acknowledge(message.rids),
                Query: self._on_query,
            },
            self._on_client_hello,
        )
        self._workers = Port(
            workers,
            self.epoch,
            self._traffic,
            {
                Heartbeat: lambda peer, message: self._workers.peers.beat(peer, message),
                Goodbye: self._on_worker_goodbye,
                Result: self._on_result,
                PlanRequired: self._on_plan_required,
            },
            self._on_worker_hello,
        )
        self._orders: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._numbers, self._live = ClientNumbers(), LiveTokenizers()
        self._ranks = Ranks(config.tensor_parallel_size)
        self._memory: Memory | None = None
        self._core: Scheduler | None = None  # from the moment all ranks are there
        self._step_began = 0.0  # when the oldest step in flight became the one the workers run
        self._audit = Audit()
        self._grammars = Grammars(config.model, config.download_dir, self._wake)
        self._ended: int | None = None
        log.info("listening on %s and %s", clients_address, workers_address)

    def stop(self, reason: str, code: int) -> None:
        """Ends the run from any thread or signal handler; open streams get ``reason`` as their error."""
        self._orders.put((reason, code))
        self._wake()

    def _wake(self) -> None:
        """Lets the loop go round, from any thread."""
        with contextlib.suppress(OSError):  # closed already, or full of earlier wake-ups
            self._wake_in.send(b"\0")

    def run(self) -> int:
        """The loop. Whatever ends it, every open stream gets a last word."""
        poller = zmq.Poller()
        for readable in (self._clients.socket, self._workers.socket, self._wake_out):
            poller.register(readable, zmq.POLLIN)
        due = time.monotonic()
        try:
            while self._ended is None:
                idle_until = 0.0 if self._audit.is_under_way else due
                poller.poll(max(0, int((idle_until - time.monotonic()) * 1000) + 1))
                self._workers.drain()
                self._clients.drain()
                self._obey()
                self._take_built()
                self._advance()
                self._go_on_auditing()
                now = time.monotonic()
                if now >= due:
                    self._tick(now, lag=now - due)
                    due = now + HEARTBEAT_INTERVAL
        except ConfigError as error:
            self._end(str(error), 2)
        except Exception as error:
            log.exception("the scheduler cannot go on")
            self._end(f"the scheduler failed: {type(error).__name__}: {error}", 1)
        finally:
            self._close()
        return 1 if self._ended is None else self._ended

    # ---- the loop's parts ------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        with contextlib.suppress(queue.Empty):
            self._end(*self._orders.get_nowait())

    def _advance(self) -> None:
        """Sends the plans that can be made, then the tokens that have come: the device must not wait for us."""
        core = self._core
        if core is None:
            return
        self._send_mask(core)
        while self._ended is None and (plan := core.plan()) is not None:
            if len(core.steps) == 1:
                self._step_began = time.monotonic()
            self._to_workers(plan)
            self._send_mask(core)
            if self._plan_log is not None:
                self._plan_log.write(plan, core)
        self._deliver(core)

    def _go_on_auditing(self) -> None:
        if self._core is not None and self._audit.is_under_way and (problem := self._audit.go_on(self._core)):
            log.error("the memory's books are wrong (please report this): %s", problem)
            self._core.stats.audit_failed()

    def _send_mask(self, core: Scheduler) -> None:
        """Before the plan that follows: the workers look for it while they compute."""
        if (mask := core.mask()) is not None:
            self._to_workers(mask)

    def _to_workers(self, message: Plan | Mask) -> None:
        frames = encode(message)
        for member in self._ranks.members():
            self._workers.send_frames(member.raw, frames)

    def _deliver(self, core: Scheduler) -> None:
        for outbox in core.streams.ready():
            self._clients.send(outbox.owner, outbox.take(core.last_step))

    def _tick(self, now: float, lag: float) -> None:
        self._beat()
        beat = Heartbeat(self.epoch, self._traffic.received, lag)
        self._clients.send_all(beat)
        self._workers.send_all(beat)
        for peer in self._clients.peers.silent():
            self._lose_client(peer, f"has been silent for {now - peer.heard:.1f} s")
        for peer in self._workers.peers.silent():
            self._on_silent_worker(peer, now)
        core = self._core
        if core is None:
            return
        for rid in core.expire():
            log.warning("request %#x: nobody acknowledged its end", rid)
        if core.steps and now - self._step_began > self._config.step_timeout:
            step_id = core.steps[0].step_id
            ranks = ", ".join(map(str, self._ranks.missing(step_id)))
            self._end(f"worker rank {ranks} gave no result for step {step_id} in {now - self._step_began:.0f} s", 1)
        self._audit.begin(core)
        if not self._config.disable_log_stats and (line := core.stats.line(core.load, now)):
            log.info(line)

    def _end(self, message: str, code: int, *, wanted: bool = False) -> None:
        """The last word: every open stream ends with ``message``, and the workers may go.

        wanted: somebody asked for it, whatever the code; so is an end with code 0.
        """
        if self._ended is not None:
            return
        self._ended = code
        wanted = wanted or code == 0
        log.log(logging.INFO if wanted else logging.ERROR, "ending: %s", message)
        if self._core is not None:
            self._core.end_all(message)
            self._deliver(self._core)
        self._workers.send_all(Goodbye("" if wanted else message))  # a reason means that something went wrong

    def _close(self) -> None:
        self._grammars.close()
        self._clients.close()
        self._workers.close()
        if self._zap is not None:
            self._zap.stop()
        self._context.term()  # waits for the last words, as long as their sockets linger
        self._wake_in.close()
        self._wake_out.close()
        if self._plan_log is not None:
            self._plan_log.close()

    def _core_for(self, peer: Peer) -> Scheduler:
        """Raises WireError unless ``peer`` is a tokenizer: all about a request comes on the channel it came on."""
        if peer.identity.role != "tokenizer":
            raise WireError(f"what is about requests comes from tokenizers, not from a {peer.identity.role}")
        return self._need_core()

    def _need_core(self) -> Scheduler:
        if self._core is None:
            raise WireError("no worker is ready yet; wait for WELCOME")
        return self._core

    # ---- clients ---------------------------------------------------------------------------------------------------

    def _on_client_hello(self, raw: bytes, hello: Hello) -> None:
        if hello.role not in ("gateway", "tokenizer"):
            raise WireError(f"role {hello.role!r} is not for the clients' socket")
        if hello.role == "tokenizer":
            check_tokenizer(hello)
        peer = self._clients.peers.add(raw, hello)
        if peer.identity.role != hello.role:
            self._clients.peers.remove(raw)
            raise WireError(f"identity {raw!r} says HELLO as {hello.role!r}")
        if hello.role == "gateway":
            peer.client_number = self._numbers.assign(raw)
        if self._core is not None:
            self._welcome(self._clients, peer)
            self._update_roster()

    def _welcome(self, port: Port, peer: Peer) -> None:
        memory = self._memory
        assert memory is not None
        port.send(
            peer.raw,
            Welcome(
                epoch=self.epoch,
                client_number=peer.client_number,
                block_size=memory.block_size,
                num_blocks=memory.num_blocks,
                max_model_len=memory.max_model_len if self._core is None else self._core.limits.max_model_len,
                vocab_size=memory.vocab_size,
                eos_ids=memory.eos_ids,
                model_digest=memory.model_digest,
                model_name=memory.model_name,
                defaults=memory.defaults,
            ),
        )
        if peer.identity.role == "gateway":
            port.send(peer.raw, self._live.message())

    def _update_roster(self) -> None:
        if self._live.update(self._clients.peers.with_role("tokenizer")):
            roster = encode(self._live.message())
            for peer in self._clients.peers.with_role("gateway"):
                self._clients.send_frames(peer.raw, roster)

    def _lose_client(self, peer: Peer, why: str) -> None:
        self._clients.peers.remove(peer.raw)
        ended = 0
        if self._core is not None:
            if peer.identity.role == "tokenizer":
                ended = self._core.drop_owner(peer.raw)
            else:
                ended = self._core.drop_client(peer.client_number)
            self._update_roster()
        log.info("%s %s; %d requests cancelled", peer.identity, why, ended)

    def _on_submit(self, peer: Peer, message: SubmitTokens) -> None:
        core = self._core_for(peer)
        if message.grammar and message.rid not in core.streams.requests:
            assert self._memory is not None
            self._grammars.ask(peer.raw, message, self._memory)
        else:
            self._submit(core, peer.raw, message, None)

    def _take_built(self) -> None:
        """Requests whose grammars are ready."""
        for owner, message, grammar in self._grammars.take():
            if self._clients.peers.get(owner) is not None:
                self._submit(self._need_core(), owner, message, grammar)

    def _submit(
        self, core: Scheduler, owner: bytes, message: SubmitTokens, grammar: Grammar | GrammarError | None
    ) -> None:
        try:
            if isinstance(grammar, GrammarError):
                raise RequestError(f"the grammar cannot be used: {grammar}", code="grammar_failed")
            accept = core.submit(owner, message, grammar)
        except RequestError as error:
            log.debug("request %s refused: %s", message.request_id, error.message)
            code, param = error.code or "", error.param or ""
            reject = Reject(message.rid, error.status, code, param, error.message, error.retry_after)
            self._clients.send(owner, reject)
            return
        if accept is not None:
            self._clients.send(owner, accept)

    def _on_query(self, peer: Peer, query: Query) -> None:
        if query.what == "metrics":
            snapshots = [self._traffic.registry.snapshot()]
            if self._core is not None:
                self._core.stats.refresh(self._core.load, self._core.admission.waiting_by_reason())
                self._core.stats.refresh_slots(self._core.pool.num_used, filled_slots(self._core))
                snapshots.append(self._core.stats.registry.snapshot())
            others = [*self._clients.peers, *self._workers.peers]
            snapshots += [other.metrics for other in others if other.metrics and other.raw != peer.raw]
            reply = reports.metrics(query, snapshots)
        elif query.what == "status":
            ranks = sorted(member.identity.index for member in self._ranks.members())
            clients = list(self._clients.peers)
            reply = reports.status(query, self.epoch, ranks, self._live.message(), clients, self._core)
        elif query.what == "ledger":
            reply = reports.ledger(query, self._core, time.monotonic(), time.time())
        elif query.what == "explain":
            reply = reports.explain(query, self._core)
        else:
            reply = reports.unknown(query)
        self._clients.send(peer.raw, reply)

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _on_worker_hello(self, raw: bytes, hello: Hello) -> None:
        if hello.role != "worker":
            raise WireError(f"role {hello.role!r} is not for the workers' socket")
        peer = self._workers.peers.add(raw, hello)
        if hello.memory is None:  # the DEALER of a rank's heartbeat thread, which may come before the rank itself
            if self._ranks.member_of(peer) is not None:
                self._welcome(self._workers, peer)
            return
        try:
            self._ranks.join(peer)
        except WireError:
            self._workers.peers.remove(raw)
            raise
        self._memory = self._memory or hello.memory
        if self._core is None and self._ranks.complete:
            self._become_ready()
        self._welcome(self._workers, peer)

    def _become_ready(self) -> None:
        self._memory = self._ranks.memory()
        limits = Limits.build(self._config, self._memory)
        self._core = Scheduler(limits, Stats(limits), scheduler_epoch=self.epoch, worker_epoch=self._ranks.epoch)
        log.info("all worker ranks are here (%d): %s", self._ranks.size, limits.describe())
        if limits.max_model_len < self._memory.max_model_len:
            log.warning(
                "max_model_len is lowered from %d to %d, which is what the KV memory holds",
                self._memory.max_model_len,
                limits.max_model_len,
            )
        for peer in self._clients.peers:
            self._welcome(self._clients, peer)
        self._update_roster()

    def _on_worker_goodbye(self, peer: Peer, message: Goodbye) -> None:
        self._workers.peers.remove(peer.raw)
        if peer.hello.memory is not None:
            # Nothing is served without it, but at the end of a server it is only the first to go.
            why = message.reason or "it shuts down"
            self._end(f"worker rank {peer.identity.index} has left: {why}", 1, wanted=not message.reason)

    def _on_silent_worker(self, peer: Peer, now: float) -> None:
        """A rank's main thread may be in a long step; it is dead when its heartbeat thread is silent as well."""
        voices = [one for one in self._workers.peers if self._ranks.member_of(one) is self._ranks.member_of(peer)]
        silence = now - max(one.heard for one in voices)
        if self._ranks.member_of(peer) is None:
            self._workers.peers.remove(peer.raw)
        elif silence > SILENCE_LIMIT:
            self._end(f"worker rank {peer.identity.index} has been silent for {silence:.1f} s", 1)

    def _on_result(self, peer: Peer, result: Result) -> None:
        core = self._need_core()
        if peer.hello.memory is None or result.rank != peer.identity.index:
            raise WireError(f"a result of rank {result.rank} does not come from that rank")
        pair = (result.scheduler_epoch, result.worker_epoch)
        in_flight = any(step.step_id == result.step_id for step in core.steps)
        if pair != (core.scheduler_epoch, core.worker_epoch) or not in_flight:
            self._traffic.stale.inc()
            return
        try:
            whole = self._ranks.take(result)
            if whole is None:
                return
            core.retire(whole.step_id, whole.slots, whole.ids, whole.timings, whole.logprobs, whole.prompt_logprobs)
        except (RankError, StepError) as error:
            self._end(str(error), 1)
            return
        self._step_began = time.monotonic()
        self._advance()

    def _on_plan_required(self, peer: Peer, message: PlanRequired) -> None:
        core = self._need_core()
        if (message.scheduler_epoch, message.worker_epoch) != (core.scheduler_epoch, core.worker_epoch):
            self._traffic.stale.inc()
            return
        log.warning("worker rank %d lost a plan after step %d; starting over", peer.identity.index, message.last_step)
        self._ranks.forget_steps()
        core.restart(self._ranks.epoch)
