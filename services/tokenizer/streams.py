"""All requests of this tokenizer: from a gateway's words to the scheduler's tokens and back.

Knows no socket. ``to_scheduler`` sends a message and tells whether it was queued; ``to_gateway`` sends to a raw
identity and drops what cannot be delivered (the gateway then asks with RESUME).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from services.tokenizer.detokenizer import Pieces
from services.tokenizer.encoder import Prompt
from services.tokenizer.logprobs import prompt_in_words
from services.tokenizer.request import OutputSequence, Request, State, TextBatch
from shared.codec import no_ids
from shared.errors import RequestError, WireError
from shared.logprobs import Found, by_entry
from shared.metrics import Registry
from shared.sampling import LogitRules
from shared.wire import (
    Accept,
    Ack,
    Cancel,
    Done,
    Finished,
    Message,
    PromptLogprobs,
    Reject,
    Resume,
    Stop,
    SubmitText,
    SubmitTokens,
    Tokens,
    Welcome,
)

log = logging.getLogger(__name__)

CANCEL_MEMORY = 10.0  # seconds a CANCEL waits for its SUBMIT,
MOST_CANCELS = 65_536  # and how many such are remembered, the newest
RESUME_INTERVAL = 1.0  # seconds between two RESUMEs of a sequence
QUIET_LIMIT = 5.0  # seconds without a token after which the scheduler is asked whether one was lost
ACK_INTERVAL = 2.0  # seconds after which an end without ACK is told again
ACK_LIMIT = 60.0  # seconds after which it is forgotten


class PromptEncoder(Protocol):
    async def prompt(self, message: SubmitText, limits: Welcome) -> Prompt: ...


class Streams:
    """process: this tokenizer's identity in metrics. clock: monotonic seconds."""

    def __init__(
        self,
        pieces: Pieces,
        encoder: PromptEncoder,
        metrics: Registry,
        *,
        process: str,
        to_scheduler: Callable[[Message], bool],
        to_gateway: Callable[[bytes, Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pieces, self._encoder = pieces, encoder
        self._to_scheduler, self._to_gateway, self._clock = to_scheduler, to_gateway, clock
        self._requests: dict[int, Request] = {}
        self._cancels: dict[int, float] = {}  # rids whose SUBMIT is to be ignored, and until when
        self._encoding: set[asyncio.Task[None]] = set()
        self._labels = (process,)
        self._submitted = metrics.counter("quire:requests", "Requests given to a process.", ["process"])
        self._submitted.inc(0, self._labels)
        self._encoded = metrics.counter("quire:prompts_encoded", "Prompts turned into tokens.")
        self._detokenized = metrics.counter("quire:tokens_detokenized", "Output tokens turned into text.")
        self._open = metrics.gauge("quire:tokenizer_open_requests", "Requests in this tokenizer that are not over.")

    @property
    def open_requests(self) -> int:
        return sum(request.done is None for request in self._requests.values())

    # ---- from a gateway --------------------------------------------------------------------------------------------

    def submit(self, gateway: bytes, message: SubmitText, limits: Welcome) -> None:
        """Starts a request, or attaches the gateway again to one that is known."""
        known = self._requests.get(message.rid)
        if known is not None:
            self._attach(known, gateway, message.generated_counts)
            return
        if self._cancels.get(message.rid, 0.0) > self._clock():
            return
        request = Request(message.rid, message.request_id, gateway, message.return_token_ids, self._clock())
        self._requests[message.rid] = request
        self._submitted.inc(1, self._labels)
        task = asyncio.get_running_loop().create_task(self._encode(request, message, limits))
        self._encoding.add(task)
        task.add_done_callback(self._encoding.discard)

    async def _encode(self, request: Request, message: SubmitText, limits: Welcome) -> None:
        try:
            prompt = await self._encoder.prompt(message, limits)
            sequences = self._sequences(message, prompt, limits)
        except RequestError as error:
            self._refuse(request, error)
            return
        except Exception as error:  # this request's own fault or ours, but no other's
            log.exception("%s: while encoding", request.request_id)
            self._refuse(request, RequestError(f"encoding failed: {error}", status=500, code="internal_error"))
            return
        if request.cancelled or self._requests.get(request.rid) is not request:
            self._forget(request)
            return
        self._encoded.inc()
        log.debug("%s: %d prompt tokens", request.request_id, len(prompt.ids))
        request.state, request.heard = State.SUBMITTED, self._clock()
        request.sequences, request.prompt_tokens = sequences, len(prompt.ids)
        sampling = message.sampling
        if request.return_ids or sampling.prompt_logprobs >= 0:
            request.prompt_ids = prompt.ids
        request.prompt, request.skip_special = prompt.text, message.skip_special_tokens
        if sampling.max_tokens is None or message.clamp_max_tokens:
            sampling = replace(sampling, max_tokens=prompt.max_tokens)
        if prompt.bad_words:
            rules = replace(sampling.rules or LogitRules(), bad_words=prompt.bad_words)
            sampling = replace(sampling, rules=rules)
        request.submit = SubmitTokens(
            rid=message.rid,
            request_id=message.request_id,
            sampling=sampling,
            prompt_ids=prompt.ids,
            priority=message.priority,
            cache_salt=message.cache_salt,
            tenant=message.tenant,
            arrival=message.arrival,
            timeout=message.timeout,
            generated=message.generated,
            generated_counts=message.generated_counts,
            grammar=prompt.grammar,
        )
        if not self._to_scheduler(request.submit):
            self._refuse(request, RequestError("the scheduler cannot be reached", status=503, code="unavailable"))

    def _sequences(self, message: SubmitText, prompt: Prompt, limits: Welcome) -> list[OutputSequence]:
        """Fresh sequences, or those of a request that was under way elsewhere, at the text its tokens stand for."""
        rules = message.sampling.rules
        silent = frozenset[int]()
        if not message.include_stop_str_in_output:
            silent |= frozenset(message.sampling.stop_token_ids)
        if not message.sampling.ignore_eos:
            silent |= frozenset(limits.eos_ids)
        sequences = [
            OutputSequence(
                self._pieces,
                stops=prompt.stops,
                include_stop=message.include_stop_str_in_output,
                silent=silent,
                skip_special=message.skip_special_tokens,
                min_tokens=0 if rules is None else rules.min_tokens,
                parser=prompt.parser() if prompt.parser is not None else None,
                shown=prompt.shown,
            )
            for _ in range(message.sampling.n)
        ]
        counts, ids = message.generated_counts, message.generated.tolist()
        if sum(counts) != len(ids) or len(counts) > len(sequences) or any(count < 0 for count in counts):
            raise RequestError("generated_counts do not fit the generated ids", param="generated")
        start = 0
        for sequence, count in zip(sequences, counts, strict=False):
            sequence.push(ids[start : start + count])
            sequence.take()
            start += count
        return sequences

    def _attach(self, request: Request, gateway: bytes, counts: list[int]) -> None:
        request.gateway = gateway
        if request.state is not State.ACCEPTED:
            return
        self._to_gateway(gateway, _accept(request))
        batch = TextBatch()
        batch.prompt(request)
        for seq, sequence in enumerate(request.sequences):
            have = counts[seq] if seq < len(counts) else 0
            batch.add(request, seq, sequence.since(sequence.offset_of_token(have)))
        self._tell_ends(request, batch)
        self._send(gateway, batch)

    def cancel(self, rid: int, reason: str = "") -> None:
        request = self._requests.get(rid)
        if request is None:
            self._remember_cancel(rid)
        elif not request.cancelled and request.done is None:
            request.cancelled, request.heard = True, self._clock()
            if request.state is State.ENCODING:
                # Its SUBMIT must not be forwarded, nor one that comes late on the same rid.
                self._remember_cancel(rid)
                self._forget(request)
            else:
                self._to_scheduler(Cancel(rid, reason))

    def _remember_cancel(self, rid: int) -> None:
        self._cancels.pop(rid, None)
        self._cancels[rid] = self._clock() + CANCEL_MEMORY
        if len(self._cancels) > MOST_CANCELS:
            del self._cancels[next(iter(self._cancels))]

    def resume(self, gateway: bytes, message: Resume) -> None:
        """Tells one sequence again from a character offset, and every end."""
        request = self._requests.get(message.rid)
        if request is None or request.state is not State.ACCEPTED or not 0 <= message.seq < len(request.sequences):
            return
        batch = TextBatch()
        batch.prompt(request)
        batch.add(request, message.seq, request.sequences[message.seq].since(message.offset))
        self._tell_ends(request, batch)
        self._send(gateway, batch)

    def acknowledge(self, rids: Iterable[int]) -> None:
        over = [rid for rid in rids if rid in self._requests and self._requests[rid].done is not None]
        for rid in over:
            self._forget(self._requests[rid])
        if over:
            self._to_scheduler(Ack(over))

    def lose_gateway(self, gateway: bytes) -> None:
        """Cancels everything that this gateway asked for: nobody is left to read it."""
        for request in list(self._requests.values()):
            if request.gateway == gateway:
                request.gateway = None
                if request.done is not None:
                    self.acknowledge([request.rid])
                else:
                    self.cancel(request.rid, "the gateway is gone")

    # ---- from the scheduler ----------------------------------------------------------------------------------------

    def accept(self, message: Accept) -> None:
        request = self._requests.get(message.rid)
        if request is None or request.state is State.ENCODING:
            return
        request.heard = self._clock()
        if request.state is State.SUBMITTED:
            request.state, request.submit = State.ACCEPTED, None
            request.prompt_tokens = message.prompt_tokens
            if request.gateway is not None:
                self._to_gateway(request.gateway, _accept(request))
            batch = TextBatch()
            for seq, sequence in enumerate(request.sequences):
                self._stop_if_found(request, seq, sequence, batch)  # in what it had generated elsewhere
            if request.gateway is not None:
                self._send(request.gateway, batch)

    def reject(self, message: Reject) -> None:
        request = self._requests.get(message.rid)
        if request is None or request.state is not State.SUBMITTED:
            return
        self._forget(request)
        if request.gateway is not None:
            self._to_gateway(request.gateway, message)

    def tokens(self, message: Tokens) -> None:
        """Turns one step's ids into text: one TEXT to each gateway it concerns. Raises WireError for bad columns."""
        if not len(message.rids) == len(message.seqs) == len(message.offsets) == len(message.counts):
            raise WireError("Tokens: columns of different length")
        if sum(message.counts) != len(message.ids) or any(count < 0 for count in message.counts):
            raise WireError(f"Tokens: counts do not cut {len(message.ids)} ids")
        now, ids, start, new = self._clock(), message.ids.tolist(), 0, 0
        batches: defaultdict[bytes | None, TextBatch] = defaultdict(TextBatch)
        logprobs = dict(by_entry(message.logprobs)) if message.logprobs is not None else {}
        for cached in message.cached:
            if (found := self._find(cached.rid, 0)) is not None and not found[0].cached_tokens:
                found[0].cached_tokens = cached.tokens
                batches[found[0].gateway].prompt(found[0])
        for prompt in message.prompts:
            self._take_prompt(prompt, batches)
        for rid, seq, offset, count in zip(message.rids, message.seqs, message.offsets, message.counts, strict=True):
            end = start + count
            found = self._find(rid, seq)
            if found is not None:
                request, sequence = found
                request.heard = now
                found_logprobs = [logprobs[place] for place in range(start, end)] if start in logprobs else []
                batch = batches[request.gateway]
                new += self._grow(request, seq, sequence, offset, ids[start:end], found_logprobs, batch)
            start = end
        self._detokenized.inc(new)
        for finished in message.finished:
            found = self._find(finished.rid, finished.seq)
            if found is not None:
                request, sequence = found
                if sequence.finished is not None:
                    sequence.surplus = max(0, finished.tokens - len(sequence.ids))
                elif finished.tokens > len(sequence.ids):
                    self._ask(request, finished.seq, sequence)
                else:
                    sequence.end(finished)
                    batch = batches[request.gateway]
                    batch.add(request, finished.seq, sequence.take())
                    batch.finish(sequence)
        for done in message.done:
            self._end(done, batches)
        for gateway, batch in batches.items():
            if gateway is not None:
                self._send(gateway, batch)

    def _take_prompt(self, prompt: PromptLogprobs, batches: defaultdict[bytes | None, TextBatch]) -> None:
        found = self._find(prompt.rid, 0)
        if found is None or found[0].prompt_words:
            return
        request, _ = found
        ids, known = request.prompt_ids.tolist(), dict(by_entry(prompt.logprobs))
        request.prompt_words = prompt_in_words(self._pieces, ids, known, request.skip_special)
        batches[request.gateway].prompt(request)

    def _grow(
        self,
        request: Request,
        seq: int,
        sequence: OutputSequence,
        offset: int,
        ids: list[int],
        logprobs: list[Found],
        batch: TextBatch,
    ) -> int:
        """Returns how many of the ids were new."""
        have = len(sequence.ids)
        if sequence.over or offset + len(ids) <= have:
            return 0
        if offset > have:
            self._ask(request, seq, sequence)
            return 0
        if offset < have:
            ids, logprobs = ids[have - offset :], logprobs[have - offset :]
        sequence.push(ids, logprobs)
        batch.add(request, seq, sequence.take())
        if sequence.stop_string is not None:
            self._stop_if_found(request, seq, sequence, batch)
        return len(sequence.ids) - have

    def _stop_if_found(self, request: Request, seq: int, sequence: OutputSequence, batch: TextBatch) -> None:
        """Ends a sequence in which a stop string was found: the gateway hears it at once, the scheduler too."""
        if sequence.stop_string is not None and sequence.finished is None:
            keep = len(sequence.ids)
            sequence.end(Finished(request.rid, seq, keep, "stop", sequence.stop_string))
            batch.finish(sequence)
            self._to_scheduler(Stop(request.rid, seq, keep))

    def _end(self, done: Done, batches: defaultdict[bytes | None, TextBatch]) -> None:
        request = self._requests.get(done.rid)
        if request is None:
            self._to_scheduler(Ack([done.rid]))  # over and forgotten here: its first ACK was lost
            return
        if request.done is not None or request.state is State.ENCODING:
            return
        if not request.all_finished:
            for seq, sequence in enumerate(request.sequences):
                if sequence.finished is None:
                    self._ask(request, seq, sequence)
            return
        surplus = sum(sequence.surplus for sequence in request.sequences)
        request.done = done = replace(done, completion_tokens=done.completion_tokens - surplus)
        request.done_at = request.told_at = self._clock()
        if request.gateway is None:
            self.acknowledge([request.rid])
        else:
            batches[request.gateway].end(done)

    def _find(self, rid: int, seq: int) -> tuple[Request, OutputSequence] | None:
        request = self._requests.get(rid)
        if request is None or not 0 <= seq < len(request.sequences):
            return None
        if request.state is State.SUBMITTED:  # its ACCEPT was lost
            self.accept(Accept(rid, request.prompt_tokens))
        return request, request.sequences[seq]

    def _ask(self, request: Request, seq: int, sequence: OutputSequence) -> None:
        """RESUME, but not again for every step that comes before the answer."""
        now = self._clock()
        if now - sequence.resume_asked >= RESUME_INTERVAL:
            sequence.resume_asked = now
            self._to_scheduler(Resume(request.rid, seq, len(sequence.ids)))

    def welcomed_again(self) -> None:
        """The same scheduler has taken this process in anew: something may have been lost in between."""
        for request in self._requests.values():
            if request.state is not State.ENCODING and request.done is None:
                self._poke(request)

    def fail_all(self, why: str, *, status: int = 503, code: str = "unavailable") -> None:
        """Ends every open request with an error; the scheduler is told to drop them, if it still can hear."""
        for request in list(self._requests.values()):
            if request.done is not None:
                continue
            if request.state is not State.ENCODING:
                self._to_scheduler(Cancel(request.rid, why))
            if request.state is not State.ACCEPTED or request.gateway is None:
                self._refuse(request, RequestError(why, status=status, code=code, retry_after=1.0))
                continue
            batch = TextBatch()
            for seq, sequence in enumerate(request.sequences):
                if sequence.finished is None:
                    sequence.end(Finished(request.rid, seq, len(sequence.ids), "error", "", why))
                    batch.add(request, seq, sequence.take())
                    batch.finish(sequence)
            completion = sum(len(sequence.ids) for sequence in request.sequences)
            request.done = Done(request.rid, request.prompt_tokens, 0, completion)
            request.done_at = request.told_at = self._clock()
            batch.end(request.done)
            self._send(request.gateway, batch)

    # ---- time ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a second: asks again where a last message may have been lost, and forgets what nobody asks for."""
        now = self._clock()
        self._cancels = {rid: until for rid, until in self._cancels.items() if until > now}
        for request in list(self._requests.values()):
            if request.done is not None:
                self._tell_again(request, now)
            elif request.state is State.ENCODING or now - request.heard < QUIET_LIMIT:
                continue
            elif request.cancelled and request.state is State.SUBMITTED:  # and the scheduler has nothing to say on it
                self._forget(request)
            else:
                request.heard = now
                self._poke(request)
        self._open.set(self.open_requests)

    def _tell_again(self, request: Request, now: float) -> None:
        if request.gateway is None or now - request.done_at >= ACK_LIMIT:
            self.acknowledge([request.rid])
        elif now - request.told_at >= ACK_INTERVAL:
            request.told_at = now
            batch = TextBatch()
            self._tell_ends(request, batch)
            self._send(request.gateway, batch)

    def _poke(self, request: Request) -> None:
        """Says again all that the scheduler may have missed, which is idempotent, and asks for what was missed here."""
        if request.submit is not None:
            self._to_scheduler(request.submit)
        if request.cancelled:
            self._to_scheduler(Cancel(request.rid, "cancelled"))
        for seq, sequence in enumerate(request.sequences):
            if sequence.stop_string is not None:
                self._to_scheduler(Stop(request.rid, seq, len(sequence.ids)))
            self._to_scheduler(Resume(request.rid, seq, len(sequence.ids)))

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _refuse(self, request: Request, error: RequestError) -> None:
        """The REJECT of a request that has not been accepted."""
        if self._requests.get(request.rid) is not request:
            return
        self._forget(request)
        log.debug("%s: refused: %s", request.request_id, error.message)
        if request.gateway is not None:
            self._to_gateway(
                request.gateway,
                Reject(
                    request.rid, error.status, error.code or "", error.param or "", error.message, error.retry_after
                ),
            )

    def _tell_ends(self, request: Request, batch: TextBatch) -> None:
        for sequence in request.sequences:
            batch.finish(sequence)
        if request.done is not None:
            batch.end(request.done)

    def _forget(self, request: Request) -> None:
        if self._requests.get(request.rid) is request:
            del self._requests[request.rid]

    def _send(self, gateway: bytes, batch: TextBatch) -> None:
        message = batch.message()
        if message is not None:
            self._to_gateway(gateway, message)


def _accept(request: Request) -> Accept:
    return Accept(
        request.rid, request.prompt_tokens, request.prompt_ids if request.return_ids else no_ids(), request.prompt
    )
