"""How requests come in: checked against the limits, and put in line."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.beam_search import BeamSearch
from services.scheduler.grammar import Grammar
from services.scheduler.limits import Limits, split_generated
from services.scheduler.prefix_cache import Chain
from services.scheduler.queues import Queues
from services.scheduler.request import Request, Sequence, State
from services.scheduler.running import Running
from services.scheduler.stats import Stats
from services.scheduler.streams import Streams
from services.scheduler.tables import Tables
from shared.errors import RequestError
from shared.grammar import GrammarError
from shared.wire import SubmitTokens

REMEMBER_CANCEL = 10.0  # seconds an unknown rid's CANCEL keeps its SUBMIT from running,
MOST_CANCELS = 65_536  # and how many such are remembered, the newest


class Intake:
    def __init__(
        self,
        limits: Limits,
        tables: Tables,
        running: Running,
        queues: Queues,
        streams: Streams,
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._tables = tables
        self._running = running
        self._queues = queues
        self._streams = streams
        self._stats = stats
        self._clock = clock
        self._arrivals = 0
        self._cancelled: dict[int, float] = {}  # rid → when its early CANCEL came

    def take(self, owner: bytes, message: SubmitTokens, grammar: Grammar | None) -> Request:
        """A new request, in line. Raises RequestError when it cannot be served (400), or the queue is full (429).

        ``grammar``: of the message's, at its beginning.
        """
        max_tokens = self._limits.check(message)
        sampling = message.sampling
        if sampling.use_beam_search:
            self._limits.check_beams(len(message.prompt_ids), max_tokens, sampling.n)
            if grammar is not None:
                raise RequestError("use_beam_search: beams cannot be held to a grammar", param="use_beam_search")
        self._check_queue(message)
        self._arrivals += 1
        eos_ids = frozenset() if sampling.ignore_eos else self._limits.eos_ids
        request = Request(
            rid=message.rid,
            request_id=message.request_id,
            outbox=self._streams.outbox(owner),
            prompt=message.prompt_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=frozenset(sampling.stop_token_ids) | eos_ids,
            priority=message.priority,
            order=self._arrivals,
            arrived=self._clock(),
            tenant=message.tenant,
            timeout=message.timeout,
        )
        salt = self._limits.salt(message.cache_salt, message.tenant)
        generated = split_generated(message)
        generated += [[] for _ in range(sampling.best_of - sampling.n)]
        request.sequences = [Sequence(request, i, ids, Chain(salt)) for i, ids in enumerate(generated)]
        if grammar is not None:
            for sequence in request.sequences:
                sequence.grammar = _follow(grammar, sequence.output)
        self._streams.requests[request.rid] = request
        self._put_in_line(request)
        return request

    def cancelled_early(self, rid: int) -> None:
        """A CANCEL came before its SUBMIT."""
        self._cancelled.pop(rid, None)
        self._cancelled[rid] = self._clock()
        if len(self._cancelled) > MOST_CANCELS:
            del self._cancelled[next(iter(self._cancelled))]

    def is_cancelled(self, rid: int) -> bool:
        return rid in self._cancelled

    def forget_cancels(self, now: float) -> None:
        self._cancelled = {rid: at for rid, at in self._cancelled.items() if now - at < REMEMBER_CANCEL}

    def _put_in_line(self, request: Request) -> None:
        """All sequences with tokens of their own already; else one, which computes the prompt for its siblings."""
        if any(sequence.output for sequence in request.sequences):
            for sequence in request.sequences:
                self._queues.waiting.add(sequence)
            return
        leader, *others = request.sequences
        if request.sampling.use_beam_search:
            request.search = BeamSearch.of(request.sampling, request.max_tokens, request.stop_ids)
            request.beams = [leader]
        else:
            leader.forks = others
        for sequence in others:
            sequence.state = State.FORK if request.search is None else State.BEAM
        self._queues.waiting.add(leader)

    def _check_queue(self, message: SubmitTokens) -> None:
        """Raises RequestError 429 when the queue is full, beyond what can start at once."""
        limits, waiting, rows = self._limits, self._queues.waiting, self._running.rows.num_free
        if message.generated_counts:
            return
        n = max(message.sampling.n, message.sampling.best_of)
        tokens = n * len(message.prompt_ids)
        room = self._tables.pool.num_available * limits.block_size if rows else 0
        if len(waiting) + n > limits.max_num_queued_reqs + rows:
            name, problem = "max_num_queued_reqs", f"{len(waiting)} requests are waiting already"
        elif limits.max_num_queued_tokens is not None and waiting.tokens + tokens > limits.max_num_queued_tokens + room:
            name = "max_num_queued_tokens"
            problem = f"{waiting.tokens} prompt tokens are waiting already, and this request has {tokens}"
        else:
            return
        self._stats.rejected(name)
        raise RequestError(
            f"{problem} ({name} is {getattr(limits, name)})",
            status=429,
            code="queue_full",
            retry_after=self._stats.retry_after(waiting.tokens, len(waiting), self._clock()),
        )


def _follow(grammar: Grammar, output: list[int]) -> Grammar:
    """A copy of ``grammar`` behind ``output``, which came with a re-submission."""
    copy = grammar.copy()
    try:
        for token in output:
            copy.take(token)
    except GrammarError as error:
        raise RequestError(f"generated: does not follow the grammar: {error}", param="generated") from error
    return copy
