"""How sequences and requests end: by their tokens, a stop, a cancel, an error, too late, or as the best of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from services.scheduler.limits import Limits
from services.scheduler.queues import Queues
from services.scheduler.request import Request, Sequence, State
from services.scheduler.running import Running
from services.scheduler.stats import Stats
from services.scheduler.streams import Streams
from services.scheduler.swaps import Swaps
from shared.wire import Done, Finished


class Ends:
    def __init__(
        self,
        limits: Limits,
        running: Running,
        queues: Queues,
        swaps: Swaps,
        streams: Streams,
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._running = running
        self._queues = queues
        self._swaps = swaps
        self._streams = streams
        self._stats = stats
        self._clock = clock

    def end_if_over(self, sequence: Sequence) -> None:
        """Finishes a sequence whose last token ends it."""
        request, token = sequence.request, sequence.output[-1]
        if token in request.stop_ids:
            is_eos = token in self._limits.eos_ids and not request.sampling.ignore_eos
            self._finish(sequence, "stop", stop_reason="" if is_eos else str(token))
        elif len(sequence.output) >= request.max_tokens:
            self._finish(sequence, "length")

    def end_all(self, requests: Iterable[Request], reason: str, *, message: str = "", code: str = "") -> int:
        """Ends what is left of requests. Returns how many were open."""
        still_open = [request for request in requests if request.done is None]
        for request in still_open:
            for sequence in request.sequences:
                if sequence.finished is None:
                    self._finish(sequence, reason, message=message, code=code)
        return len(still_open)

    def end_the_late(self, now: float) -> None:
        """Ends requests that waited for too long or are past their deadline, running or not."""
        limit = self._limits.max_queue_time
        for request in [request for request in self._streams.requests.values() if request.done is None]:
            waited, waiting = now - request.arrived, request.scheduled is None
            if now >= request.deadline:
                code = "queue_timeout" if waiting else "deadline_exceeded"
                message = f"not complete {waited:.1f} s after its arrival: timeout is {request.timeout:g} s"
            elif waiting and waited >= limit and not any(sequence.output for sequence in request.sequences):
                code, message = "queue_timeout", f"waited {waited:.1f} s: max_queue_time is {limit:g} s"
            else:
                continue
            self._stats.expired(code)
            self.end_all([request], "error", message=message, code=code)

    def append(self, sequence: Sequence, token: int) -> None:
        """One more output token, which is told and counts for its tenant; what it ends is another matter."""
        request, shares = sequence.request, self._queues.waiting.shares
        sequence.output.append(token)
        if not request.is_held:
            self._streams.token(sequence)
        if shares is not None:
            shares.serve(request.tenant, output_tokens=1)

    def complete(self, sequence: Sequence) -> None:
        """What its output has to be is complete."""
        self._finish(sequence, "stop")

    def break_off(self, sequence: Sequence, message: str) -> None:
        """What its output has to be cannot be reached from where it is."""
        self._finish(sequence, "error", message=message, code="grammar_failed")

    def stop(self, sequence: Sequence, keep: int) -> None:
        """Ends a sequence after ``keep`` tokens, also when it had ended by itself after more. Idempotent."""
        keep = min(keep, len(sequence.output))
        if sequence.finished is not None:
            if sequence.finished.reason in ("stop", "length"):
                self._stats.taken_back(len(sequence.output) - keep)
                self._streams.shorten(sequence, keep)
            self._streams.send_ends(sequence.request)
            return
        self._stats.taken_back(len(sequence.output) - keep)
        del sequence.output[keep:], sequence.logprobs[keep:]
        self._finish(sequence, "stop")

    def advance_beams(self, request: Request) -> int:
        """One step of a search, when all its beams have their offers; returns the tokens of the answer at its end."""
        search, shares = request.search, self._queues.waiting.shares
        assert search is not None
        if not self._running.beams.advance(request, search):
            return 0
        for sequence, hypothesis in zip(request.sequences, search.hypotheses, strict=True):
            sequence.output, sequence.logprobs = hypothesis.output.tokens, hypothesis.output.logprobs
            sequence.cumulative = hypothesis.cumulative
        output = sum(len(sequence.output) for sequence in request.sequences)
        if shares is not None:
            shares.serve(request.tenant, output_tokens=output)
        for sequence in list(request.sequences):
            self.end_if_over(sequence)
        return output

    def _finish(
        self, sequence: Sequence, reason: str, *, stop_reason: str = "", message: str = "", code: str = ""
    ) -> None:
        request = sequence.request
        self._queues.leave(sequence)
        self._queues.hand_over_forks(sequence)
        if sequence.slot >= 0 or (sequence.state is State.BEAM and sequence.blocks):
            self._running.vacate(sequence)
        self._swaps.forget(sequence)
        sequence.state = State.FINISHED
        finished = Finished(request.rid, sequence.index, len(sequence.output), reason, stop_reason, message, code)
        self._streams.end(sequence, finished)
        if all(one.finished is not None for one in request.sequences):
            now = self._clock()
            if request.is_held:
                self._answer_held(request)
            self._streams.complete(request, _done(request, now), now)
            self._stats.ended(request, now)

    def _answer_held(self, request: Request) -> None:
        """Everything of a request with beams or best_of is over: its best sequences are the answer."""
        self._running.beams.requests.pop(request, None)
        chosen = request.sequences
        ends = [sequence.finished for sequence in chosen if sequence.finished is not None]
        if broken := next((end for end in ends if end.reason in ("abort", "error")), None):
            for sequence in chosen:  # what there is of it was to be no answer yet
                sequence.output, sequence.finished = [], replace(broken, tokens=0)
        if request.search is None:
            chosen = sorted(chosen, key=lambda sequence: -sequence.cumulative)[: request.sampling.n]
        self._streams.answer(request, chosen)


def _done(request: Request, now: float) -> Done:
    scheduled = now if request.scheduled is None else request.scheduled
    first_token = now if request.first_token is None else request.first_token
    return Done(
        rid=request.rid,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens,
        completion_tokens=sum(len(sequence.output) for sequence in request.sequences),
        queue_time=scheduled - request.arrived,
        prefill_time=first_token - scheduled,
        decode_time=now - first_token,
        preemptions=request.preemptions,
    )
