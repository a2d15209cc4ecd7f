"""The gateway's side of the pipeline: links to scheduler and tokenizers, and the requests under way on them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import zmq.asyncio

from services.gateway.calls import Call, Request
from services.gateway.metrics import GatewayMetrics
from services.gateway.model import Limits
from services.gateway.queries import Queries
from shared.codec import no_ids
from shared.errors import ConfigError, RequestError
from shared.ids import Identity, RidMaker, new_epoch
from shared.link import Link
from shared.transport import Endpoint, Security
from shared.wire import (
    PROTOCOL_VERSION,
    Accept,
    Ack,
    Cancel,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Reject,
    Reply,
    Resume,
    Roster,
    SubmitText,
    Text,
    Welcome,
)

log = logging.getLogger(__name__)

NO_IDS = no_ids()
QUIET_LIMIT = 10.0  # seconds without news of an accepted request after which the gateway asks whether it missed some
FAILURE_STATUS = {"queue_timeout": 503, "deadline_exceeded": 503, "grammar_failed": 400}  # any other: 500
START_GRACE = 600.0  # seconds before the first WELCOME during which the process still counts as alive


class Tokenizer:
    """The channel to one tokenizer and the requests that travel on it."""

    def __init__(self, identity: str) -> None:
        self.name = " ".join(identity.split(":")[:2])
        self.requests: dict[int, Request] = {}
        self.queries = Queries()
        self.epoch = 0
        self.last_given = 0  # a number that grows with every request given to any of them
        self.draining = False  # it finishes what it has and takes nothing new
        self.link: Link  # set right after, as the link's callbacks need this object

    def send(self, message: Message) -> bool:
        return self.link.send(message)


class Engine:
    """Gives requests to tokenizers and feeds them with what comes back.

    All of it runs on one event loop. A request is cancelled when its ``call`` block ends before it does, so whoever
    leaves the block, for whatever reason, leaves nothing behind.
    """

    def __init__(
        self,
        connect: str,
        index: int,
        security: Security,
        metrics: GatewayMetrics,
        on_gone: Callable[[str], None],
    ) -> None:
        """on_gone is called with a reason when there is no server to join any more."""
        self.metrics = metrics
        self.ready = asyncio.Event()  # set once a request could be served for the first time
        self.closing = ""
        self._security = security
        self._context = zmq.asyncio.Context()
        self._identity = Identity.fresh("gateway", index)
        self._epoch = new_epoch()
        self._started = time.monotonic()
        self._lost = ""
        self._welcome: Welcome | None = None
        self._rids: RidMaker | None = None
        self._progress = 0
        self._tokenizers: dict[str, Tokenizer] = {}
        self._unusable: set[str] = set()  # identities on the roster whose address cannot be connected to
        self._turns = itertools.count(1)
        self._unplaced: dict[int, Request] = {}
        self._queries = Queries()
        self._watching: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._scheduler = Link(
            self._context,
            self._identity.encode(),
            Endpoint(connect).clients,
            security,
            name="scheduler",
            hello=self._hello,
            heartbeat=self._heartbeat,
            on_message=self._on_scheduler,
            on_welcome=self._on_welcome,
            on_lost=self._on_scheduler_lost,
            on_gone=on_gone,
        )

    def start(self) -> None:
        self._scheduler.start()
        self._watching = asyncio.create_task(self._watch())

    async def close(self, reason: str) -> None:
        """Says GOODBYE everywhere."""
        if self._watching is not None:
            self._watching.cancel()
        links = [self._scheduler, *(tokenizer.link for tokenizer in self._tokenizers.values())]
        await asyncio.gather(*(link.close(reason) for link in links), *self._leaving, return_exceptions=True)
        self._context.destroy(linger=200)

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def unhealthy(self) -> str:
        """Why this server is dead as far as clients are concerned; empty while it lives (or still starts)."""
        if self._lost:
            return self._lost
        if self._welcome is None and time.monotonic() - self._started > START_GRACE:
            return f"no scheduler has welcomed this gateway for {START_GRACE:g} s"
        return ""

    @property
    def unready(self) -> str:
        """Why requests cannot be answered now; empty when they can."""
        if self.closing:
            return self.closing
        if not self._scheduler.welcomed or self._welcome is None:
            return self._lost or "the model is not ready: waiting for the scheduler and its workers"
        if self._least_loaded() is None:
            return "waiting for a tokenizer"
        return ""

    @property
    def limits(self) -> Limits:
        """The model's limits. Raises RequestError 503 before they are known."""
        if self._welcome is None:
            raise self._unavailable(self.unready)
        welcome = self._welcome
        return Limits(welcome.vocab_size, welcome.max_model_len, defaults=welcome.defaults)

    @property
    def model_name(self) -> str:
        """The server's own name of its model. Raises RequestError 503 before it is known."""
        if self._welcome is None:
            raise self._unavailable(self.unready)
        return self._welcome.model_name

    @property
    def max_model_len(self) -> int | None:
        """None until it is known."""
        return None if self._welcome is None else self._welcome.max_model_len

    # ---- requests ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, submits: Sequence[SubmitText]) -> Iterator[Call]:
        """Submits one request per prompt (rids are given here) and cancels what is not over at the block's end.

        Raises RequestError 503 when the server is closing or its scheduler is not there.
        """
        if self.closing or self._rids is None or not self._scheduler.welcomed:
            raise self._unavailable(self.unready)
        call = Call([replace(submit, rid=self._rids()) for submit in submits])
        self.metrics.requests.inc(len(call.requests), (self._identity.encode().decode(),))
        try:
            for request in call.requests:
                self._place(request)
            yield call
        finally:
            for request in call.requests:
                self._forget(request)

    def fail_all(self, reason: str) -> None:
        """Ends every open request with an error that carries ``reason``."""
        requests = list(self._open())
        if requests:
            log.warning("ending %d open requests: %s", len(requests), reason)
        for request in requests:
            request.fail(self._unavailable(reason))

    async def ask_scheduler(
        self, what: str, timeout: float, args: dict[str, Any] | None = None, cursor: int = 0
    ) -> Reply:
        """The scheduler's REPLY. Raises RequestError, 503 when it does not come within ``timeout`` seconds."""
        if not self._scheduler.welcomed:
            raise self._unavailable(self.unready)
        return await self._queries.ask(self._scheduler, what, args or {}, timeout, cursor)

    async def ask_tokenizer(self, what: str, args: dict[str, Any], timeout: float) -> Any:
        """The body of the least loaded tokenizer's REPLY. Raises RequestError as ``ask_scheduler``."""
        tokenizer = self._least_loaded()
        if tokenizer is None or self.closing:
            raise self._unavailable(self.unready)
        return (await tokenizer.queries.ask(tokenizer.link, what, args, timeout)).body

    def _unavailable(self, reason: str) -> RequestError:
        return RequestError(reason, status=503, code="unavailable", retry_after=1)

    def _open(self) -> list[Request]:
        placed = (request for tokenizer in self._tokenizers.values() for request in tokenizer.requests.values())
        return [*placed, *self._unplaced.values()]

    def _least_loaded(self) -> Tokenizer | None:
        taking = [one for one in self._tokenizers.values() if one.link.welcomed and not one.draining]
        return min(taking, key=lambda one: (len(one.requests), one.last_given), default=None)

    def _place(self, request: Request) -> None:
        tokenizer = self._least_loaded()
        if tokenizer is None:
            request.channel = None
            self._unplaced[request.rid] = request
            return
        request.channel = tokenizer
        tokenizer.requests[request.rid] = request
        tokenizer.last_given = next(self._turns)
        if not tokenizer.send(request.submit):
            request.fail(self._unavailable(f"the queue to {tokenizer.name} is full"), ended=True)

    def _place_waiting(self) -> None:
        if not self.unready:
            self.ready.set()
        waiting, self._unplaced = self._unplaced, {}
        for request in waiting.values():
            self._place(request)

    def _forget(self, request: Request) -> None:
        self._unplaced.pop(request.rid, None)
        if request.channel is None or request.channel.requests.pop(request.rid, None) is None:
            return
        if not request.ended:
            self.metrics.cancelled.inc()
            request.channel.send(Cancel(request.rid, "closed by the gateway"))

    # ---- the scheduler ----------------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        number = 0 if self._welcome is None else self._welcome.client_number
        index = self._identity.index
        return Hello(PROTOCOL_VERSION, "gateway", index, self._epoch, client_number=number, pid=os.getpid())

    def _heartbeat(self, lag: float) -> Heartbeat:
        links = [self._scheduler, *(tokenizer.link for tokenizer in self._tokenizers.values())]
        self.metrics.malformed.set(sum(link.malformed for link in links))
        self.metrics.open_requests.set(len(self._open()))
        return Heartbeat(self._epoch, self._progress, lag, self.metrics.changes())

    def _on_welcome(self, welcome: Welcome) -> None:
        before, self._welcome = self._welcome, welcome
        if before is None or before.client_number != welcome.client_number:
            self._rids = RidMaker(welcome.client_number)
        if before is not None and before.epoch != welcome.epoch:
            self.fail_all("the scheduler was restarted")
        if before is None or self._lost:
            log.info("welcomed by the scheduler as client %d", welcome.client_number)
        self._lost = ""

    def _on_scheduler_lost(self, reason: str) -> None:
        self._lost = reason
        self._queries.fail(self._unavailable(reason))
        self.fail_all(reason)

    def _on_scheduler(self, message: Any) -> None:
        if isinstance(message, Roster):
            self._on_roster(message)
        elif isinstance(message, Reply):
            self._queries.answer(message)
        else:
            log.warning("the scheduler sent %s, which a gateway does not take", type(message).__name__)

    def _on_roster(self, roster: Roster) -> None:
        live = dict(zip(roster.identities, roster.addresses, strict=True))
        for identity in self._tokenizers.keys() - live.keys():
            tokenizer = self._tokenizers.pop(identity)
            log.info("%s left", tokenizer.name)
            leaving = asyncio.create_task(tokenizer.link.close("it left the roster"))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            self._release(tokenizer, f"{tokenizer.name} is gone")
        self._unusable &= live.keys()
        for identity in live.keys() - self._tokenizers.keys() - self._unusable:
            try:
                self._tokenizers[identity] = self._join(identity, live[identity])
            except ConfigError as error:
                self._unusable.add(identity)
                log.error("tokenizer %s cannot be joined: %s", identity[:64], str(error)[:500])

    # ---- tokenizers -------------------------------------------------------------------------------------------------

    def _join(self, identity: str, address: str) -> Tokenizer:
        tokenizer = Tokenizer(identity)
        tokenizer.link = Link(
            self._context,
            self._identity.encode(),
            address,
            self._security,
            name=tokenizer.name,
            hello=self._hello,
            heartbeat=lambda lag: Heartbeat(self._epoch, self._progress, lag),
            on_message=lambda message: self._on_tokenizer(tokenizer, message),
            on_welcome=lambda welcome: self._on_tokenizer_welcome(tokenizer, welcome),
            on_lost=lambda reason: self._release(tokenizer, reason),
        )
        tokenizer.link.start()
        return tokenizer

    def _on_tokenizer_welcome(self, tokenizer: Tokenizer, welcome: Welcome) -> None:
        before, tokenizer.epoch = tokenizer.epoch, welcome.epoch
        if before == 0:
            log.info("%s joined at %s", tokenizer.name, tokenizer.link.address)
        elif before != welcome.epoch:
            self._release(tokenizer, f"{tokenizer.name} was restarted")
        else:  # it asked for a HELLO again, and may have ignored what came before that
            for request in tokenizer.requests.values():
                if not request.accepted and not request.over:
                    tokenizer.send(request.submit)
        # The link counts as welcomed only after this callback.
        asyncio.get_running_loop().call_soon(self._place_waiting)

    def _release(self, tokenizer: Tokenizer, reason: str) -> None:
        """The tokenizer is lost: what it had not accepted goes to another one, with the same rid; the rest ends."""
        requests, tokenizer.requests = tokenizer.requests, {}
        tokenizer.queries.fail(self._unavailable(reason))
        for request in requests.values():
            request.channel = None
            if request.accepted or request.over:
                request.fail(self._unavailable(reason), ended=True)
            else:
                self.metrics.resubmitted.inc()
                self._place(request)

    def _pass_on(self, tokenizer: Tokenizer, rid: int) -> None:
        """The tokenizer is on its way out and refuses new requests: another one gets this and all further ones."""
        tokenizer.draining = True
        request = tokenizer.requests.pop(rid, None)
        if request is not None:
            self.metrics.resubmitted.inc()
            self._place(request)

    def _on_tokenizer(self, tokenizer: Tokenizer, message: Any) -> None:
        self._progress += 1
        if isinstance(message, Text):
            self._on_text(tokenizer, message)
        elif isinstance(message, Accept):
            if request := tokenizer.requests.get(message.rid):
                request.heard = time.monotonic()
                request.accept(message.prompt_tokens, message.prompt_ids, message.prompt)
        elif isinstance(message, Reject):
            if message.code == "draining":
                self._pass_on(tokenizer, message.rid)
            elif request := tokenizer.requests.get(message.rid):
                request.fail(_rejection(message), ended=True)
        elif isinstance(message, Reply):
            tokenizer.queries.answer(message)
        else:
            log.warning("%s sent %s, which a gateway does not take", tokenizer.name, type(message).__name__)

    def _on_text(self, tokenizer: Tokenizer, message: Text) -> None:
        now = time.monotonic()
        for cached in message.cached:
            if request := tokenizer.requests.get(cached.rid):
                request.cached_tokens = cached.tokens
        for prompt in message.prompts:
            if request := tokenizer.requests.get(prompt.rid):
                request.prompt_logprobs = prompt.tokens
        logprobs = {one.entry: one.tokens for one in message.logprobs}
        columns = zip(
            message.rids,
            message.seqs,
            message.offsets,
            message.channels,
            message.texts,
            message.token_counts,
            message.id_counts,
            strict=True,
        )
        told: dict[Call, None] = {}  # once each, when all of the message is taken in
        begin = 0
        for entry, (rid, seq, offset, channel, text, tokens, id_count) in enumerate(columns):
            ids = message.ids[begin : begin + id_count] if id_count else NO_IDS
            begin += id_count
            request = tokenizer.requests.get(rid)
            if request is None:
                continue
            request.heard = now
            output = request.outputs[seq]
            asked, before = output.gap, output.tokens
            if request.lacks_prompt:
                output.gap = True
            elif output.feed(offset, text, tokens, ids, logprobs.get(entry, ()), channel):
                self._measure(request, output.tokens - before, now)
                told[request.call] = None
            if output.gap and not asked:
                self._ask_again(tokenizer, rid, seq, output.chars)
        for finished in message.finished:
            request = tokenizer.requests.get(finished.rid)
            if request is None or request.outputs[finished.seq].gap:
                continue
            request.outputs[finished.seq].finish(finished)
            told[request.call] = None
            if finished.reason == "error":
                request.fail(_failure(finished), ended=True)
        received = []
        for done in message.done:
            request = tokenizer.requests.get(done.rid)
            if request is not None and request.error is None:
                missing = [(seq, output) for seq, output in enumerate(request.outputs) if output.finished is None]
                for seq, output in missing:
                    if not output.gap:  # else it was asked for already
                        self._ask_again(tokenizer, done.rid, seq, output.chars)
                if missing:
                    continue
                request.finish(done)
                told[request.call] = None
                self._measure_end(request, done.completion_tokens, now)
            received.append(done.rid)
        for call in told:
            call.tell()
        if received:
            tokenizer.send(Ack(received))

    def _ask_again(self, tokenizer: Tokenizer, rid: int, seq: int, offset: int) -> None:
        self.metrics.gaps.inc()
        tokenizer.send(Resume(rid, seq, offset))

    def _measure(self, request: Request, tokens: int, now: float) -> None:
        if tokens <= 0:
            return
        if request.first_token is None:
            request.first_token = now
            self.metrics.first_token.observe(now - request.arrived)
        else:
            self.metrics.inter_token.observe((now - request.last_token) / tokens, tokens)
        request.last_token = now

    def _measure_end(self, request: Request, tokens: int, now: float) -> None:
        self.metrics.end_to_end.observe(now - request.arrived)
        if request.first_token is not None and tokens > 1:
            self.metrics.per_output_token.observe((request.last_token - request.first_token) / (tokens - 1))

    async def _watch(self) -> None:
        """Once a second: asks about accepted requests that have been quiet, in case their last messages were lost."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for tokenizer in self._tokenizers.values():
                for request in tokenizer.requests.values():
                    if request.accepted and not request.over and now - request.heard > QUIET_LIMIT:
                        request.heard = now
                        for seq, output in enumerate(request.outputs):
                            tokenizer.send(Resume(request.rid, seq, output.chars))


def _failure(finished: Finished) -> RequestError:
    """Too late is the server's load, a grammar that leaves no way on the request's fault, any other the server's."""
    status = FAILURE_STATUS.get(finished.code, 500)
    message, code = finished.message or "the request failed", finished.code or "internal_error"
    return RequestError(message, status=status, code=code)


def _rejection(message: Reject) -> RequestError:
    status = message.status if 400 <= message.status <= 599 else 500
    return RequestError(
        message.message,
        status=status,
        code=message.code or None,
        param=message.param or None,
        retry_after=message.retry_after,
    )
