"""The tokenizer's sockets: a ROUTER for gateways and a link to the scheduler, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from services.tokenizer.config import TokenizerConfig
from services.tokenizer.encoder import Encoder
from services.tokenizer.grammars import Grammars
from services.tokenizer.streams import Streams
from services.tokenizer.tokenizer import Tokenizer
from shared.errors import ConfigError, RequestError, WireError
from shared.ids import Identity, new_epoch
from shared.link import Link
from shared.log import LimitedLog
from shared.metrics import Registry
from shared.models import ModelFiles, builtin
from shared.peers import HEARTBEAT_INTERVAL, Peer, Peers
from shared.transport import LAST_WORD_MS, Endpoint, Security, bind_router, own_address_towards, start_zap
from shared.wire import (
    PROTOCOL_VERSION,
    Accept,
    Ack,
    Cancel,
    Fault,
    Goodbye,
    Heartbeat,
    Hello,
    HelloRequired,
    Message,
    Query,
    Reject,
    Reply,
    Resume,
    SubmitText,
    Tokens,
    Welcome,
    decode,
    encode,
)

log = logging.getLogger(__name__)

UNREACHABLE = "the scheduler cannot be reached"


class Service:
    """One tokenizer process. ``run`` serves until ``drain`` or ``stop`` is called, and returns the exit code.

    Made in the event loop it runs on. Raises ConfigError for addresses that cannot be used.
    """

    def __init__(self, config: TokenizerConfig, tokenizer: Tokenizer, files: ModelFiles, security: Security) -> None:
        self._config, self._files, self._security = config, files, security
        self._epoch = new_epoch()
        self._identity = Identity.fresh("tokenizer", config.index)
        self._context = zmq.asyncio.Context()
        self._metrics = Registry()
        self._malformed = self._metrics.counter("quire:malformed_messages", "Messages that could not be read.")
        self._dropped = self._metrics.counter("quire:dropped_messages", "Messages whose receiver was gone or full.")
        self._malformed_log, self._fault_log = LimitedLog(log), LimitedLog(log)
        self._told: dict[str, Any] = {}
        self._link_malformed = 0
        self._handled = 0
        self._limits: Welcome | None = None
        self._peers = Peers()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._draining = False
        self._exit_code = 0
        self._encoder = Encoder(tokenizer, Grammars(files.folder), config.encode_threads, config.chat)
        self._streams = Streams(
            tokenizer.pieces,
            self._encoder,
            self._metrics,
            process=self._identity.encode().decode(),
            to_scheduler=self._to_scheduler,
            to_gateway=self._to_gateway,
        )
        endpoint = Endpoint(config.connect)
        # The authenticator's thread works on plain sockets of the same context.
        self._zap = start_zap(zmq.Context(self._context), security) if endpoint.is_tcp else None
        wanted = config.bind or _free_address(endpoint, self._identity)
        self._router, self.bound = bind_router(self._context, wanted, security)
        self.address = advertised(config.advertise, self.bound, endpoint)
        self._link = Link(
            self._context,
            self._identity.encode(),
            endpoint.clients,
            security,
            name="the scheduler",
            hello=self._hello,
            heartbeat=self._heartbeat,
            on_message=self._from_scheduler,
            on_welcome=self._on_welcome,
            on_lost=self._on_lost,
            on_gone=lambda reason: self.stop(reason, 1),
        )
        self._handlers: dict[type[Message], Callable[[Peer, Any], None]] = {
            SubmitText: self._submit,
            Cancel: lambda peer, m: self._streams.cancel(m.rid, m.reason),
            Resume: lambda peer, m: self._streams.resume(peer.raw, m),
            Ack: lambda peer, m: self._streams.acknowledge(m.rids),
            Query: self._query,
            Heartbeat: lambda peer, m: self._peers.beat(peer, m),
            Goodbye: lambda peer, m: self._lose(peer, "it said goodbye"),
        }

    async def run(self) -> int:
        log.info("%s listens for gateways on %s, as %s", self._identity, self.bound, self.address)
        self._link.start()
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]
        ended = asyncio.create_task(self._ended.wait())
        try:
            done, _ = await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a broken loop is a bug: it ends the process with its traceback
        finally:
            for task in [*tasks, ended, *self._tasks]:
                task.cancel()
            await asyncio.gather(*tasks, ended, *self._tasks, return_exceptions=True)
            self._encoder.close()
            await self._link.close("shutting down")
            self._router.close(linger=LAST_WORD_MS)
            if self._zap is not None:
                self._zap.stop()
            self._context.term()
            _remove_socket_file(self.bound)
        return self._exit_code

    # ---- ending ----

    def drain(self) -> None:
        """Takes no new requests and ends when the open ones are over."""
        self._draining = True
        log.info("draining %d open requests", self._streams.open_requests)
        self._end_if_drained()

    def stop(self, why: str, exit_code: int = 0) -> None:
        """Ends open requests with the error ``why`` and then the process."""
        if not self._ended.is_set():
            if exit_code:
                log.error("ending: %s", why)
            self._streams.fail_all(why)
            self._exit_code = exit_code
            self._ended.set()

    def _end_if_drained(self) -> None:
        if self._draining and self._streams.open_requests == 0:
            self._ended.set()

    # ---- the scheduler ----

    def _hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, "tokenizer", self._config.index, self._epoch, self.address, pid=os.getpid())

    def _heartbeat(self, lag: float) -> Heartbeat:
        self._malformed.inc(self._link.malformed - self._link_malformed)
        self._link_malformed = self._link.malformed
        page = self._metrics.snapshot()
        metrics, self._told = (page if page != self._told else {}), page
        return Heartbeat(self._epoch, self._handled, lag, metrics)

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.model_digest not in ("", self._files.digest):
            # Ids of one vocabulary are garbage in another. No gateway was welcomed yet, so none has sent a request.
            self.stop(_other_model(welcome, self._files, self._config.connect), 2)
            return
        previous, self._limits = self._limits, welcome
        self._told = {}  # this scheduler may never have seen the metrics
        if previous is not None and previous.epoch != welcome.epoch:
            self._streams.fail_all("the scheduler was restarted")
        elif previous is not None:
            self._streams.welcomed_again()
        for peer in self._peers:
            self._welcome(peer)

    def _on_lost(self, why: str) -> None:
        log.error("%s", why)
        self._limits = None
        self._streams.fail_all(why)

    def _from_scheduler(self, message: Message) -> None:
        self._handled += 1
        try:
            if isinstance(message, Tokens):
                self._streams.tokens(message)
            elif isinstance(message, Accept):
                self._streams.accept(message)
            elif isinstance(message, Reject):
                self._streams.reject(message)
            elif isinstance(message, Goodbye):
                self._on_lost(f"the scheduler has left: {message.reason or 'no reason given'}")
            else:
                raise WireError(f"a tokenizer takes no {type(message).__name__} from the scheduler")
        except WireError as error:
            self._malformed.inc()
            self._malformed_log.warning("malformed message from the scheduler: %s", error)
            self._link.send(Fault(str(error)))
        self._end_if_drained()

    def _to_scheduler(self, message: Message) -> bool:
        sent = self._link.send(message)
        if not sent:
            self._dropped.inc()
        return sent

    # ---- gateways ----

    async def _receive(self) -> None:
        while True:
            raw, *frames = await self._router.recv_multipart()
            try:
                self._from_gateway(raw, frames)
            except WireError as error:
                self._malformed.inc()
                self._malformed_log.warning("malformed message from %r: %s", raw[:64], error)
                self._to_gateway(raw, Fault(str(error)))
            except Exception:  # one message must not end the service of all others
                log.exception("while handling a message from %r", raw[:64])
            await asyncio.sleep(0)  # while messages wait, receiving never does

    def _from_gateway(self, raw: bytes, frames: list[bytes]) -> None:
        message = decode(frames)
        self._handled += 1
        if isinstance(message, Hello):
            self._meet(raw, message)
            return
        peer = self._peers.heard(raw)
        if peer is None:
            if not isinstance(message, Fault):
                self._to_gateway(raw, HelloRequired(self._epoch))
            return
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(peer, message)
        elif isinstance(message, Fault):
            self._fault_log.warning("%s refused a message: %s", peer.identity, message.message[:500])
        else:
            raise WireError(f"a tokenizer takes no {type(message).__name__} from a gateway")

    def _meet(self, raw: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            raise WireError(f"protocol version {hello.protocol} is not {PROTOCOL_VERSION}")
        if Identity.decode(raw).role != "gateway":
            raise WireError(f"a tokenizer serves gateways, not {raw[:64]!r}")
        self._welcome(self._peers.add(raw, hello))

    def _welcome(self, peer: Peer) -> None:
        """Only a process that can serve is welcomed to: before the scheduler's own WELCOME the gateway waits."""
        if self._limits is None:
            return
        limits = self._limits
        self._to_gateway(
            peer.raw,
            Welcome(
                self._epoch,
                peer.hello.client_number,
                limits.block_size,
                limits.num_blocks,
                limits.max_model_len,
                limits.vocab_size,
                limits.eos_ids,
                limits.model_digest,
                limits.model_name,
                limits.defaults,
            ),
        )

    def _submit(self, peer: Peer, message: SubmitText) -> None:
        if self._limits is None or self._draining:
            code, why = (
                ("draining", "this tokenizer is shutting down") if self._draining else ("unavailable", UNREACHABLE)
            )
            self._to_gateway(peer.raw, Reject(message.rid, 503, code, "", why, 1.0))
            return
        self._streams.submit(peer.raw, message, self._limits)

    def _query(self, peer: Peer, query: Query) -> None:
        task = asyncio.create_task(self._answer(peer.raw, query))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, raw: bytes, query: Query) -> None:
        try:
            if self._limits is None:
                raise RequestError(UNREACHABLE, status=503, code="unavailable")
            if query.what == "tokenize":
                body = await self._encoder.tokenize(query.args, self._limits)
            elif query.what == "detokenize":
                body = await self._encoder.detokenize(query.args, self._limits)
            elif query.what == "render":
                body = await self._encoder.render(_submission(query), self._limits)
            else:
                raise RequestError(f"a tokenizer answers no query {query.what!r}", status=404, code="unknown_query")
        except RequestError as error:
            why = {"message": error.message, "code": error.code, "param": error.param}
            self._to_gateway(raw, Reply(query.number, error.status, why))
        except Exception as error:
            log.exception("while answering a query %s", query.what)
            why = {"message": f"{query.what} failed: {error}", "code": "internal_error", "param": None}
            self._to_gateway(raw, Reply(query.number, 500, why))
        else:
            self._to_gateway(raw, Reply(query.number, 200, body))

    def _to_gateway(self, raw: bytes, message: Message) -> None:
        # The asyncio socket's own send: with DONTWAIT it is done at once, and it looks for what arrived meanwhile.
        if self._router.send_multipart([raw, *encode(message)], zmq.DONTWAIT).exception() is not None:
            self._dropped.inc()

    def _lose(self, peer: Peer, why: str) -> None:
        log.info("%s is gone: %s", peer.identity, why)
        self._peers.remove(peer.raw)
        self._streams.lose_gateway(peer.raw)
        self._end_if_drained()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            lag = max(0.0, loop.time() - due)
            for peer in self._peers.silent():
                self._lose(peer, "it has been silent")
            for peer in self._peers:
                self._to_gateway(peer.raw, Heartbeat(self._epoch, self._handled, lag))
            self._streams.tick()
            self._end_if_drained()
            due = loop.time() + HEARTBEAT_INTERVAL
            await asyncio.sleep(HEARTBEAT_INTERVAL)


def _submission(query: Query) -> SubmitText:
    frames = query.args.get("submit")
    if not isinstance(frames, list) or not all(isinstance(frame, bytes) for frame in frames):
        raise RequestError("render needs the frames of a SUBMIT_TEXT", code="invalid_value", param="submit")
    try:
        message = decode(frames)
    except WireError as error:
        raise RequestError(f"submit: {error}", code="invalid_value", param="submit") from error
    if not isinstance(message, SubmitText):
        raise RequestError(f"submit is a {type(message).__name__}", code="invalid_value", param="submit")
    return message


def _other_model(welcome: Welcome, files: ModelFiles, connect: str) -> str:
    """What to tell the operator of a tokenizer whose model is not the server's."""
    own = files.name
    if own == welcome.model_name:
        own = f"other files of that name (digest {files.digest[:12]}, not {welcome.model_digest[:12]})"
    # The built-in model is the one without a name; its name is also that of files on the hub, which differ.
    model = [] if welcome.model_digest == builtin.SHA256 else [welcome.model_name]
    command = shlex.join(["quire", "tokenizer", *model, "--connect", connect])
    return f"the server at {connect} serves {welcome.model_name}, this tokenizer has {own}; start with: {command}"


def _free_address(endpoint: Endpoint, identity: Identity) -> str:
    if endpoint.is_tcp:
        return "tcp://*:0"
    # Short: a socket's whole path may have 107 bytes, and the directory is the operator's.
    return f"{endpoint.base}/t{identity.index}-{identity.incarnation[:8]}"


def _remove_socket_file(address: str) -> None:
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def advertised(advertise: str, bound: str, endpoint: Endpoint) -> str:
    """Where gateways connect: ``advertise`` as host or host:port, else this host's address towards the scheduler."""
    if not bound.startswith("tcp:"):
        if advertise:
            raise ConfigError(f"--advertise {advertise}: only a tcp address can be advertised, this one is {bound}")
        return bound
    host_and_port = advertise.removeprefix("tcp://")
    port = bound.rpartition(":")[2]
    if not host_and_port:
        host = bound.removeprefix("tcp://").rpartition(":")[0]
        if host not in ("0.0.0.0", "[::]", "*"):
            return bound
        return f"tcp://{own_address_towards(endpoint.clients)}:{port}"
    _, separator, given = host_and_port.rpartition(":")
    if separator and not given.endswith("]"):
        return f"tcp://{host_and_port}"
    return f"tcp://{host_and_port}:{port}"
