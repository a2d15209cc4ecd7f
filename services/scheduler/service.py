"""The scheduler process: two ROUTERs, one poller, no threads of its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import time
from collections.abc import Callable
from typing import Any

import zmq

from services.scheduler.config import SchedulerConfig
from services.scheduler.limits import Limits
from services.scheduler.plan_log import PlanLog
from services.scheduler.ranks import RankError, Ranks
from services.scheduler.roster import ClientNumbers, LiveTokenizers
from services.scheduler.scheduler import Scheduler
from services.scheduler.stats import Stats
from shared import options
from shared.errors import ConfigError, RequestError, WireError
from shared.ids import new_epoch
from shared.metrics import Registry
from shared.peers import HEARTBEAT_INTERVAL, SILENCE_LIMIT, Peer, Peers
from shared.transport import LAST_WORD_MS, Endpoint, bind_router, start_zap
from shared.wire import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    Fault,
    Goodbye,
    Heartbeat,
    Hello,
    HelloRequired,
    Memory,
    Message,
    PlanRequired,
    Query,
    Reject,
    Reply,
    Result,
    Resume,
    Stop,
    SubmitTokens,
    Welcome,
    decode,
    encode,
)

log = logging.getLogger(__name__)

DRAIN_AT_ONCE = 1000  # messages read from a socket before the loop looks at anything else
PAGE = 64  # entries of a QUERY's answer sent at once


class SchedulerService:
    """Runs until ``stop`` is called, a worker fails, or an error ends it; ``run`` returns the exit code."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.epoch = new_epoch()
        self._config = config
        endpoint, security = Endpoint(config.bind), options.security(config)
        self._context = zmq.Context()
        self._zap = start_zap(self._context, security)
        self._clients, self.clients_address = bind_router(self._context, endpoint.clients, security)
        self._workers, self.workers_address = bind_router(self._context, endpoint.workers, security)
        self._plan_log = PlanLog(config.plan_log) if config.plan_log else None
        self._orders: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._client_peers, self._worker_peers = Peers(), Peers()
        self._numbers, self._live = ClientNumbers(), LiveTokenizers()
        self._ranks = Ranks(config.tensor_parallel_size)
        self._memory: Memory | None = None
        self._core: Scheduler | None = None  # from the moment all ranks are there
        self._progress = 0
        self._lag = 0.0
        self._retired_at = 0.0
        self._ended: int | None = None
        self._next_fault_line = 0.0
        self._registry = Registry()
        self._malformed = self._registry.counter("quire:malformed_messages", "Messages that did not decode or fit.")
        self._dropped = self._registry.counter("quire:dropped_messages", "Messages to peers gone or too slow.")
        self._stale = self._registry.counter("quire:stale_results", "Results of another epoch or an unknown step.")
        self._client_handlers: dict[type[Message], Callable[[Peer, Any], None]] = {
            Heartbeat: self._client_peers.beat,
            Goodbye: self._on_client_goodbye,
            SubmitTokens: self._on_submit,
            Cancel: lambda peer, message: self._need_core().cancel(message.rid),
            Stop: lambda peer, message: self._need_core().stop(message.rid, message.seq, message.keep),
            Resume: lambda peer, message: self._need_core().streams.resume(message.rid, message.seq, message.offset),
            Ack: lambda peer, message: self._need_core().streams.acknowledge(message.rids),
            Query: self._on_query,
            Fault: self._on_fault,
        }
        self._worker_handlers: dict[type[Message], Callable[[Peer, Any], None]] = {
            Heartbeat: self._worker_peers.beat,
            Goodbye: self._on_worker_goodbye,
            Result: self._on_result,
            PlanRequired: self._on_plan_required,
            Fault: self._on_fault,
        }

    def stop(self, reason: str, code: int) -> None:
        """Ends the run from any thread or signal handler; open streams get ``reason`` as their error."""
        self._orders.put((reason, code))
        with contextlib.suppress(OSError):  # closed already, or a full pipe of earlier wake-ups
            self._wake_in.send(b"\0")

    def run(self) -> int:
        """The loop. Ends with the last word to every open stream, whatever ended it."""
        log.info("listening on %s and %s", self.clients_address, self.workers_address)
        poller = zmq.Poller()
        for readable in (self._clients, self._workers, self._wake_out):
            poller.register(readable, zmq.POLLIN)
        due = time.monotonic()
        try:
            while self._ended is None:
                poller.poll(max(0, int((due - time.monotonic()) * 1000) + 1))
                self._drain(self._workers, self._on_worker_frames)
                self._drain(self._clients, self._on_client_frames)
                self._obey()
                self._advance()
                now = time.monotonic()
                if now >= due:
                    self._lag = now - due
                    due = now + HEARTBEAT_INTERVAL
                    self._tick(now)
        except ConfigError as error:
            self._end(str(error), 2)
        except Exception as error:
            log.exception("the scheduler cannot go on")
            self._end(f"the scheduler failed: {error}", 1)
        finally:
            self._close()
        assert self._ended is not None
        return self._ended

    # ---- the loop's parts ------------------------------------------------------------------------------------------

    def _drain(self, sock: Any, handle: Callable[[bytes, list[bytes]], None]) -> None:
        for _ in range(DRAIN_AT_ONCE):
            try:
                raw, *frames = sock.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._progress += 1
            handle(raw, frames)

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        with contextlib.suppress(queue.Empty):
            reason, code = self._orders.get_nowait()
            self._end(reason, code)

    def _advance(self) -> None:
        """Sends the plans that can be made, then the tokens that have come: the device must not wait for us."""
        core = self._core
        if core is None:
            return
        while self._ended is None and (plan := core.plan()) is not None:
            if len(core.steps) == 1:
                self._retired_at = time.monotonic()  # the workers begin with this step now
            frames = encode(plan)
            for member in self._ranks.members():
                self._send_frames(self._workers, member.raw, frames)
            if self._plan_log is not None:
                self._plan_log.write(plan, core)
        for outbox in core.streams.ready():
            self._send(self._clients, outbox.owner, outbox.take(core.last_step))

    def _tick(self, now: float) -> None:
        beat = encode(Heartbeat(self.epoch, self._progress, self._lag))
        for sock, peers in ((self._clients, self._client_peers), (self._workers, self._worker_peers)):
            for peer in peers:
                self._send_frames(sock, peer.raw, beat)
        for peer in self._client_peers.silent():
            self._lose_client(peer, f"has been silent for {now - peer.heard:.1f} s")
        for peer in self._worker_peers.silent():
            self._on_silent_worker(peer, now)
        core = self._core
        if core is None:
            return
        for rid in core.expire():
            log.warning("request %#x: nobody acknowledged its end", rid)
        if core.steps and now - self._retired_at > self._config.step_timeout:
            step_id = core.steps[0].step_id
            ranks = ", ".join(map(str, self._ranks.missing(step_id)))
            self._end(f"worker rank {ranks} gave no result for step {step_id} in {now - self._retired_at:.0f} s", 1)
        if not self._config.disable_log_stats and (line := core.stats.line(core.load, now)):
            log.info(line)

    def _end(self, message: str, code: int) -> None:
        """The last word: every open stream ends with ``message``, and the workers may go."""
        if self._ended is not None:
            return
        self._ended = code
        log.log(logging.ERROR if code else logging.INFO, "ending: %s", message)
        if self._core is not None:
            self._core.end_all(message)
            for outbox in self._core.streams.ready():
                self._send(self._clients, outbox.owner, outbox.take(self._core.last_step))
        for peer in self._worker_peers:
            self._send(self._workers, peer.raw, Goodbye(message))

    def _close(self) -> None:
        for sock in (self._clients, self._workers):
            sock.close(linger=LAST_WORD_MS)
        if self._zap is not None:
            self._zap.stop()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()
        if self._plan_log is not None:
            self._plan_log.close()

    # ---- sending and receiving -------------------------------------------------------------------------------------

    def _send(self, sock: Any, raw: bytes, message: Message) -> None:
        self._send_frames(sock, raw, encode(message))

    def _send_frames(self, sock: Any, raw: bytes, frames: list[bytes]) -> None:
        try:
            sock.send_multipart([raw, *frames], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._dropped.inc()  # streams recover by RESUME; a peer that is gone falls silent

    def _on_client_frames(self, raw: bytes, frames: list[bytes]) -> None:
        self._receive(self._clients, self._client_peers, self._client_handlers, self._on_client_hello, raw, frames)

    def _on_worker_frames(self, raw: bytes, frames: list[bytes]) -> None:
        self._receive(self._workers, self._worker_peers, self._worker_handlers, self._on_worker_hello, raw, frames)

    def _receive(
        self,
        sock: Any,
        peers: Peers,
        handlers: dict[type[Message], Callable[[Peer, Any], None]],
        on_hello: Callable[[bytes, Hello], None],
        raw: bytes,
        frames: list[bytes],
    ) -> None:
        try:
            message = decode(frames)
            if isinstance(message, Hello):
                if message.protocol != PROTOCOL_VERSION:
                    raise WireError(f"protocol version {message.protocol} is not {PROTOCOL_VERSION}")
                on_hello(raw, message)
                return
            peer = peers.heard(raw)
            if peer is None:
                if not isinstance(message, (HelloRequired, Fault, Goodbye)):
                    self._send(sock, raw, HelloRequired(self.epoch))
                return
            handler = handlers.get(type(message))
            if handler is None:
                raise WireError(f"{type(message).__name__} is not for this socket")
            handler(peer, message)
        except WireError as error:
            self._refuse(sock, raw, str(error))

    def _refuse(self, sock: Any, raw: bytes, why: str) -> None:
        self._malformed.inc()
        self._send(sock, raw, Fault(why))
        now = time.monotonic()
        if now >= self._next_fault_line:
            self._next_fault_line = now + 1.0
            total = int(self._malformed.values[()])
            log.warning("malformed message from %r: %s (%d in all)", raw[:64], why[:500], total)

    def _on_fault(self, peer: Peer, message: Fault) -> None:
        log.warning("%s refused a message: %s", peer.identity, message.message[:500])

    def _need_core(self) -> Scheduler:
        if self._core is None:
            raise WireError("no worker is ready yet; wait for WELCOME")
        return self._core

    # ---- clients ---------------------------------------------------------------------------------------------------

    def _on_client_hello(self, raw: bytes, hello: Hello) -> None:
        if hello.role not in ("gateway", "tokenizer"):
            raise WireError(f"role {hello.role!r} is not for the clients' socket")
        peer = self._client_peers.add(raw, hello)
        if peer.identity.role != hello.role:
            self._client_peers.remove(raw)
            raise WireError(f"identity {raw!r} says HELLO as {hello.role!r}")
        if hello.role == "gateway":
            peer.client_number = self._numbers.assign(raw)
        if self._core is not None:
            self._welcome(self._clients, peer)
            self._update_roster()

    def _welcome(self, sock: Any, peer: Peer) -> None:
        memory, core = self._memory, self._core
        assert memory is not None
        self._send(
            sock,
            peer.raw,
            Welcome(
                epoch=self.epoch,
                client_number=peer.client_number,
                block_size=memory.block_size,
                num_blocks=memory.num_blocks,
                max_model_len=core.limits.max_model_len if core is not None else memory.max_model_len,
                vocab_size=memory.vocab_size,
                eos_ids=memory.eos_ids,
                model_digest=memory.model_digest,
            ),
        )
        if peer.identity.role == "gateway":
            self._send(self._clients, peer.raw, self._live.message())

    def _update_roster(self) -> None:
        if self._live.update(self._client_peers.with_role("tokenizer")):
            roster = encode(self._live.message())
            for peer in self._client_peers.with_role("gateway"):
                self._send_frames(self._clients, peer.raw, roster)

    def _on_client_goodbye(self, peer: Peer, message: Goodbye) -> None:
        self._lose_client(peer, f"said goodbye {message.reason}".rstrip())

    def _lose_client(self, peer: Peer, why: str) -> None:
        self._client_peers.remove(peer.raw)
        ended = 0
        if self._core is not None:
            if peer.identity.role == "tokenizer":
                ended = self._core.drop_owner(peer.raw)
            else:
                ended = self._core.drop_client(peer.client_number)
            self._update_roster()
        log.info("%s %s; %d of its requests cancelled", peer.identity, why, ended)

    def _on_submit(self, peer: Peer, message: SubmitTokens) -> None:
        if peer.identity.role != "tokenizer":
            raise WireError("SubmitTokens comes from tokenizers only")
        core = self._need_core()
        try:
            accept = core.submit(peer.raw, message)
        except RequestError as error:
            log.debug("request %s refused: %s", message.request_id, error.message)
            self._send(
                self._clients,
                peer.raw,
                Reject(
                    message.rid, error.status, error.code or "", error.param or "", error.message, error.retry_after
                ),
            )
            return
        if accept is not None:
            self._send(self._clients, peer.raw, accept)

    def _on_query(self, peer: Peer, query: Query) -> None:
        if query.what == "metrics":
            self._reply_page(peer, query, self._snapshots(peer))
        elif query.what == "status":
            self._reply_page(peer, query, [self._client_status(one) for one in self._client_peers], self._status())
        else:
            body = {"message": f"unknown question {query.what!r}", "code": "not_found", "param": "what"}
            self._send(self._clients, peer.raw, Reply(query.number, 404, body))

    def _reply_page(self, peer: Peer, query: Query, entries: list[Any], rest: dict[str, Any] | None = None) -> None:
        start = max(query.cursor, 0)
        page = entries[start : start + PAGE]
        following = start + PAGE if start + PAGE < len(entries) else 0
        body = page if rest is None else {**rest, "clients": page}
        self._send(self._clients, peer.raw, Reply(query.number, 200, body, following))

    def _snapshots(self, asker: Peer) -> list[dict[str, Any]]:
        own = [self._registry.snapshot()]
        if self._core is not None:
            self._core.stats.refresh(self._core.load)
            own.append(self._core.stats.registry.snapshot())
        others = [*self._client_peers, *self._worker_peers]
        return own + [peer.metrics for peer in others if peer.metrics and peer.raw != asker.raw]

    def _client_status(self, peer: Peer) -> dict[str, Any]:
        return {
            "identity": peer.raw.decode(),
            "address": peer.hello.address,
            "client_number": peer.client_number,
            "progress": peer.progress,
            "lag": peer.lag,
            "heard": time.monotonic() - peer.heard,
        }

    def _status(self) -> dict[str, Any]:
        roster = self._live.message()
        status: dict[str, Any] = {
            "ready": self._core is not None,
            "scheduler_epoch": self.epoch,
            "ranks": sorted(peer.identity.index for peer in self._ranks.members()),
            "tensor_parallel_size": self._ranks.size,
            "roster": dict(zip(roster.identities, roster.addresses, strict=True)),
            "roster_version": roster.version,
        }
        if self._core is not None:
            load = self._core.load
            status |= {
                "worker_epoch": self._core.worker_epoch,
                "running": load.running,
                "waiting": load.waiting,
                "preempted": load.preempted,
                "requests": len(self._core.streams.requests),
                "blocks_used": load.blocks_used,
                "blocks_total": load.blocks_total,
                "steps_in_flight": [step.step_id for step in self._core.steps],
                "last_step": self._core.last_step,
                "max_model_len": self._core.limits.max_model_len,
            }
        return status

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _on_worker_hello(self, raw: bytes, hello: Hello) -> None:
        if hello.role != "worker":
            raise WireError(f"role {hello.role!r} is not for the workers' socket")
        peer = self._worker_peers.add(raw, hello)
        if hello.memory is None:  # the DEALER of a rank's heartbeat thread, which may come before the rank itself
            if self._ranks.member_of(peer) is not None:
                self._welcome(self._workers, peer)
            return
        try:
            self._ranks.join(peer)
        except WireError:
            self._worker_peers.remove(raw)
            raise
        if self._core is None and self._ranks.complete:
            self._become_ready()
        self._memory = self._memory or hello.memory
        self._welcome(self._workers, peer)

    def _become_ready(self) -> None:
        self._memory = self._ranks.memory()
        limits = Limits.build(self._config, self._memory)
        self._core = Scheduler(limits, Stats(limits), scheduler_epoch=self.epoch, worker_epoch=self._ranks.epoch)
        log.info("all %d worker ranks are here: %s", self._ranks.size, limits.describe())
        if limits.max_model_len < self._memory.max_model_len:
            log.warning(
                "max_model_len is lowered from %d to %d, which is what the KV memory holds",
                self._memory.max_model_len,
                limits.max_model_len,
            )
        for peer in self._client_peers:
            self._welcome(self._clients, peer)
        self._update_roster()

    def _on_worker_goodbye(self, peer: Peer, message: Goodbye) -> None:
        self._worker_peers.remove(peer.raw)
        if peer.hello.memory is not None:
            self._end(f"worker rank {peer.identity.index} has left: {message.reason or 'no reason given'}", 1)

    def _on_silent_worker(self, peer: Peer, now: float) -> None:
        """A rank's main thread may be in a long step; it counts as dead when its heartbeat thread is silent as well."""
        voices = [
            other
            for other in self._worker_peers
            if other.identity.index == peer.identity.index and other.hello.epoch == peer.hello.epoch
        ]
        silence = now - max(other.heard for other in voices)
        if self._ranks.member_of(peer) is None:
            self._worker_peers.remove(peer.raw)
        elif silence > SILENCE_LIMIT and peer.hello.memory is not None:
            self._end(f"worker rank {peer.identity.index} has been silent for {silence:.1f} s", 1)

    def _on_result(self, peer: Peer, result: Result) -> None:
        core = self._need_core()
        in_flight = any(step.step_id == result.step_id for step in core.steps)
        pair = (result.scheduler_epoch, result.worker_epoch)
        if peer.hello.memory is None or result.rank != peer.identity.index:
            raise WireError(f"a result of rank {result.rank} does not come from that rank")
        if pair != (core.scheduler_epoch, core.worker_epoch) or not in_flight:
            self._stale.inc()
            return
        try:
            whole = self._ranks.take(result)
        except RankError as error:
            self._end(str(error), 1)
            return
        if whole is not None:
            core.retire(whole.step_id, whole.slots, whole.ids)
            self._retired_at = time.monotonic()
            self._advance()

    def _on_plan_required(self, peer: Peer, message: PlanRequired) -> None:
        core = self._need_core()
        if message.scheduler_epoch != self.epoch:
            self._stale.inc()
            return
        log.warning("worker rank %d lost a plan after step %d; starting over", peer.identity.index, message.last_step)
        self._ranks.forget_steps()
        core.restart(self._ranks.epoch)
