"""The streams of all requests: which tokenizer gets them, from which offset, and who has yet to acknowledge the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.scheduler.outbox import Outbox
from services.scheduler.request import Request, Sequence
from shared.wire import Done, Finished

RESEND_AFTER = 2.0  # seconds after which an unacknowledged end is sent again
FORGET_AFTER = 60.0  # seconds after which an end that nobody acknowledges is given up


class Streams:
    """Keeps every request, and so all of its ids, until its DONE is acknowledged."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.unacknowledged: dict[int, Request] = {}
        self._outboxes: dict[bytes, Outbox] = {}

    def outbox(self, owner: bytes) -> Outbox:
        if owner not in self._outboxes:
            self._outboxes[owner] = Outbox(owner)
        return self._outboxes[owner]

    def ready(self) -> list[Outbox]:
        """The outboxes with something to send."""
        return [outbox for outbox in self._outboxes.values() if outbox]

    def of_owner(self, owner: bytes) -> list[Request]:
        return [request for request in self.requests.values() if request.outbox.owner == owner]

    def attach(self, request: Request, owner: bytes, counts: list[int]) -> None:
        """``owner`` takes a request over, having ``counts`` tokens of each sequence already."""
        request.outbox = self.outbox(owner)
        self.cached(request)
        if request.is_held:
            return
        for sequence in request.sequences:
            self._send_from(sequence, counts[sequence.index] if sequence.index < len(counts) else 0)
        self.send_ends(request)

    def resume(self, owner: bytes, rid: int, index: int, offset: int) -> None:
        """Sends a sequence's ids again from ``offset``, the request's ends included.

        Who asks about a request that is not known any more gets an end, and need not wait for ever.
        """
        request = self.requests.get(rid)
        if request is None:
            outbox = self.outbox(owner)
            outbox.finished(Finished(rid, index, offset, "error", message="the scheduler does not know this request"))
            outbox.done(Done(rid, prompt_tokens=0, cached_tokens=0, completion_tokens=offset))
        elif 0 <= index < len(request.sequences) and not request.is_held:
            self.cached(request)
            self._send_from(request.sequences[index], offset)
            self.send_ends(request)

    def send_ends(self, request: Request) -> None:
        """Sends what is known of the request's ends, for the first time or again."""
        for sequence in request.sequences:
            if sequence.finished is not None:
                request.outbox.finished(sequence.finished)
        if request.done is not None:
            request.outbox.done(request.done)

    def cached(self, request: Request) -> None:
        """Sends how much of the prompt was computed already, if anything."""
        if request.cached_tokens:
            request.outbox.cached(request.rid, request.cached_tokens)

    def token(self, sequence: Sequence) -> None:
        """Sends the newest token of a sequence, with all that is told of it."""
        self._send_from(sequence, len(sequence.output) - 1)

    def end(self, sequence: Sequence, finished: Finished) -> None:
        sequence.finished = finished
        if not sequence.request.is_held:
            sequence.request.outbox.finished(finished)

    def answer(self, request: Request, chosen: list[Sequence]) -> None:
        """A held request is over: these of its sequences, the best first, are told whole."""
        request.sequences = chosen
        for index, sequence in enumerate(chosen):
            assert sequence.finished is not None
            sequence.index, sequence.finished = index, replace(sequence.finished, seq=index)
            self._send_from(sequence, 0)
            request.outbox.finished(sequence.finished)

    def shorten(self, sequence: Sequence, keep: int) -> None:
        """A finished sequence turns out to have been stopped after ``keep`` tokens."""
        request = sequence.request
        del sequence.output[keep:], sequence.logprobs[keep:]
        sequence.finished = Finished(request.rid, sequence.index, keep, "stop")
        if request.done is not None:
            tokens = sum(len(one.output) for one in request.sequences)
            request.done = replace(request.done, completion_tokens=tokens)

    def complete(self, request: Request, done: Done, now: float) -> None:
        """All sequences are over; the request is kept until the tokenizer acknowledges that."""
        request.done, request.ended = done, now
        request.outbox.done(done)
        self.unacknowledged[request.rid] = request

    def acknowledge(self, rids: Iterable[int]) -> None:
        """Forgets requests whose DONE has arrived."""
        for rid in rids:
            if self.unacknowledged.pop(rid, None) is not None:
                del self.requests[rid]

    def forget_owner(self, owner: bytes) -> None:
        """A tokenizer is gone, and all of its requests are over: nobody will acknowledge them."""
        self.acknowledge([request.rid for request in self.of_owner(owner)])
        self._outboxes.pop(owner, None)

    def expire(self, now: float) -> list[int]:
        """Repeats unacknowledged ends, and gives up the oldest, whose rids it returns."""
        given_up = []
        for request in self.unacknowledged.values():
            age = now - request.ended
            if age >= RESEND_AFTER:
                self.send_ends(request)
            if age >= FORGET_AFTER:
                given_up.append(request.rid)
        self.acknowledge(given_up)
        return given_up

    def _send_from(self, sequence: Sequence, offset: int) -> None:
        offset = max(offset, 0)
        missing = sequence.output[offset:]
        if missing:
            request = sequence.request
            if request.sampling.prompt_logprobs >= 0 and sequence.index == offset == 0:
                request.outbox.prompt(request.rid, request.prompt_logprobs)
            request.outbox.tokens(request.rid, sequence.index, offset, missing, sequence.logprobs[offset:])
