"""The scheduler's metrics under vLLM's names, its token rates, and the throughput line of its log."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from services.scheduler.limits import Limits
from services.scheduler.request import Request
from shared.metrics import Registry

LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BUCKETS = (1, 8, *(2**power for power in range(4, 15)))
LINE_INTERVAL = 10.0  # seconds between throughput lines
WAIT_REASONS = ("prefix", "slots", "budget", "memory", "turn", "preempted")
RATE_WINDOW = 10.0  # seconds over which the token rate behind Retry-After is measured


@dataclass(frozen=True, slots=True)
class Load:
    """The scheduler's gauges of now. blocks_logical: those in use, as often as tables name them."""

    running: int
    waiting: int
    preempted: int
    blocks_used: int
    blocks_total: int
    blocks_cached: int
    blocks_logical: int = 0
    swapped: int = 0
    host_blocks_used: int = 0

    @property
    def usage(self) -> float:
        return self.blocks_used / self.blocks_total


def size_buckets(largest: int) -> list[int]:
    """The 1-2-5 series up to ``largest``."""
    series = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    return [value for value in series if value <= largest]


class Stats:
    def __init__(self, limits: Limits) -> None:
        self.registry = r = Registry()
        sizes = size_buckets(limits.max_model_len)
        self._running = r.gauge("vllm:num_requests_running", "Sequences that have a slot.")
        self._waiting = r.gauge("vllm:num_requests_waiting", "Sequences that wait for a slot or for memory.")
        self._by_reason = r.gauge("vllm:num_requests_waiting_by_reason", "Waiting sequences by reason.", ["reason"])
        self._waits_for = r.gauge("quire:num_requests_waiting_by_reason", "What sequences wait for.", ["reason"])
        self._usage = r.gauge("vllm:kv_cache_usage_perc", "Blocks in use over usable blocks, 0 to 1.")
        self._prompt = r.counter("vllm:prompt_tokens", "Prompt tokens computed, each prompt once.")
        self._cached = r.counter("vllm:prompt_tokens_cached", "Prompt tokens whose KV was in the prefix cache.")
        self._sources = r.counter("vllm:prompt_tokens_by_source", "Prompt tokens by origin of their KV.", ["source"])
        self._prefix_queries = r.counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._prefix_hits = r.counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self._collisions = r.counter("quire:prefix_cache_collisions", "Look-ups whose key was another content's.")
        self._evictions = r.counter("quire:prefix_cache_evictions", "Cached blocks given to others.")
        self._audits = r.counter("quire:memory_audit_failures", "Times an idle scheduler's books were found wrong.")
        self._copies = r.counter("quire:block_copies", "Blocks copied, by reason.", ["reason"])
        self._slots = r.gauge("quire:kv_slots", "Token slots of blocks in use, and those that hold a token.", ["state"])
        self._block_size = limits.block_size
        self._blocks = r.gauge("quire:kv_blocks", "Usable blocks by state.", ["state"])
        self._logical = r.gauge("quire:kv_blocks_logical", "Blocks in the tables of sequences, shared ones repeated.")
        self._host_blocks = r.gauge("quire:host_blocks_used", "Blocks of swapped sequences in host memory.")
        self._swapped = r.gauge("vllm:num_requests_swapped", "Preempted sequences whose memory is on the host.")
        self._preempted_by = r.counter("quire:preemptions", "Groups that lost their memory, by mode.", ["mode"])
        self._generation = r.counter("vllm:generation_tokens", "Output tokens delivered.")
        self._preemptions = r.counter("vllm:num_preemptions", "Sequences that lost their memory to others.")
        self._success = r.counter("vllm:request_success", "Requests ended, by reason.", ["finished_reason"])
        self._rejections = r.counter("vllm:admission_rejections", "Requests refused with 429, by limit.", ["reason"])
        self._expired = r.counter("quire:requests_expired", "Requests ended because they were too late.", ["code"])
        self._iteration = r.histogram("vllm:iteration_tokens_total", "Tokens computed per step.", ITERATION_BUCKETS)
        self._queue = r.histogram("vllm:request_queue_time_seconds", "Arrival to first plan.", LATENCY_BUCKETS)
        self._prefill = r.histogram("vllm:request_prefill_time_seconds", "First plan to first token.", LATENCY_BUCKETS)
        self._decode = r.histogram("vllm:request_decode_time_seconds", "First token to the end.", LATENCY_BUCKETS)
        self._inference = r.histogram("vllm:request_inference_time_seconds", "First plan to the end.", LATENCY_BUCKETS)
        self._prompt_size = r.histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", sizes)
        self._output_size = r.histogram("vllm:request_generation_tokens", "Output tokens per request.", sizes)
        self._max_tokens = r.histogram("vllm:request_params_max_tokens", "max_tokens per request.", sizes)
        self._n = r.histogram("vllm:request_params_n", "n per request.", (1, 2, 5, 10, 20))
        config = {"block_size": limits.block_size, "num_gpu_blocks": limits.num_blocks}
        info = r.gauge("vllm:cache_config_info", "Configuration of the KV cache, in its labels.", list(config))
        info.set(1.0, tuple(str(value) for value in config.values()))
        self._overcount = 0  # delivered tokens that a later STOP took back
        self._line_prompt = 0
        self._line_generation = 0
        self._line_queries = 0
        self._line_hits = 0
        self._line_since: float | None = None
        self._line_active = False
        self._rate: deque[tuple[float, int]] = deque()
        self._rate_tokens = 0
        self._outputs_ended = 0
        self._requests_ended = 0

    def stepped(self, tokens: int, now: float) -> None:
        """A step that computed ``tokens`` tokens is retired."""
        self._iteration.observe(tokens)
        self._rate.append((now, tokens))
        self._rate_tokens += tokens
        while self._rate[0][0] < now - RATE_WINDOW:
            self._rate_tokens -= self._rate.popleft()[1]

    def prompt_computed(self, tokens: int) -> None:
        self._prompt.inc(tokens)
        self._line_prompt += tokens

    def looked_up(self, tokens: int, cached: int) -> None:
        """A sequence was admitted for the first time, ``cached`` of its ``tokens`` being in the prefix cache."""
        self._prefix_queries.inc(tokens)
        self._prefix_hits.inc(cached)
        self._line_queries += tokens
        self._line_hits += cached

    def cache_events(self, collisions: int, evictions: int) -> None:
        if collisions:
            self._collisions.inc(collisions)
        if evictions:
            self._evictions.inc(evictions)

    def audit_failed(self) -> None:
        self._audits.inc()

    def copied(self, reason: str) -> None:
        self._copies.inc(1.0, (reason,))

    def prompt_cached(self, tokens: int, cached: int) -> None:
        """Where a prompt's tokens came from."""
        self._cached.inc(cached)
        self._sources.inc(cached, ("local_cache_hit",))
        self._sources.inc(tokens - cached, ("local_compute",))

    def delivered(self, tokens: int) -> None:
        self._line_generation += tokens
        paid = min(self._overcount, tokens)
        self._overcount -= paid
        self._generation.inc(tokens - paid)

    def taken_back(self, tokens: int) -> None:
        """Tokens counted as delivered lie behind a stop string. A counter never falls, so the next ones pay."""
        self._overcount += tokens

    def preempted(self) -> None:
        self._preemptions.inc()

    def group_preempted(self, mode: str) -> None:
        self._preempted_by.inc(1.0, (mode,))

    def rejected(self, limit: str) -> None:
        self._rejections.inc(1.0, (limit,))

    def expired(self, code: str) -> None:
        self._expired.inc(1.0, (code,))

    def scheduled(self, request: Request, now: float) -> None:
        self._queue.observe(now - request.arrived)

    def ended(self, request: Request, now: float) -> None:
        finished = [sequence.finished for sequence in request.sequences if sequence.finished is not None]
        self._success.inc(1.0, (finished[0].reason,))
        output = sum(one.tokens for one in finished)
        self._outputs_ended += output
        self._requests_ended += 1
        self._prompt_size.observe(len(request.prompt))
        self._output_size.observe(output)
        self._max_tokens.observe(request.max_tokens)
        self._n.observe(len(request.sequences))
        if request.scheduled is not None:
            self._inference.observe(now - request.scheduled)
            if request.first_token is not None:
                self._prefill.observe(request.first_token - request.scheduled)
                self._decode.observe(now - request.first_token)

    def retry_after(self, queued_prompt_tokens: int, queued: int, now: float) -> float:
        """Seconds until the queue as it stands is likely worked off, at the measured token rate (1 to 600)."""
        if not self._rate:
            return 1.0
        rate = self._rate_tokens / max(now - self._rate[0][0], 0.1)
        output = self._outputs_ended / max(self._requests_ended, 1)
        return min(max((queued_prompt_tokens + queued * output) / max(rate, 0.1), 1.0), 600.0)

    def refresh(self, load: Load, waiting_by_reason: Mapping[str, int]) -> None:
        """Sets the gauges; called before a snapshot."""
        for reason in WAIT_REASONS:
            self._waits_for.set(waiting_by_reason.get(reason, 0), (reason,))
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._by_reason.set(load.waiting - load.preempted, ("capacity",))
        self._by_reason.set(load.preempted, ("deferred",))
        self._usage.set(load.usage)
        self._swapped.set(load.swapped)
        self._logical.set(load.blocks_logical)
        self._host_blocks.set(load.host_blocks_used)
        self._blocks.set(load.blocks_used, ("used",))
        self._blocks.set(load.blocks_cached, ("cached",))
        self._blocks.set(load.blocks_total - load.blocks_used - load.blocks_cached, ("free",))

    def refresh_slots(self, blocks_used: int, filled: int) -> None:
        """Of the token slots in blocks in use, those that hold a token."""
        self._slots.set(blocks_used * self._block_size, ("in_use",))
        self._slots.set(filled, ("filled",))

    def line(self, load: Load, now: float) -> str | None:
        """The throughput line every ten seconds, and None while nothing happens (after one last line that says so)."""
        since = self._line_since
        if since is not None and now - since < LINE_INTERVAL:
            return None
        self._line_since = now
        active = bool(self._line_prompt or self._line_generation or load.running or load.waiting)
        was_active, self._line_active = self._line_active, active
        prompt, generation = self._line_prompt, self._line_generation
        queries, hits = self._line_queries, self._line_hits
        self._line_prompt = self._line_generation = self._line_queries = self._line_hits = 0
        if since is None or not (active or was_active):
            return None
        seconds = max(now - since, 1e-3)
        return (
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generation / seconds:.1f} tokens/s, "
            f"Running: {load.running} reqs, Waiting: {load.waiting} reqs, "
            f"GPU KV cache usage: {load.usage * 100:.1f}%, "
            f"Prefix cache hit rate: {100 * hits / max(queries, 1):.1f}%"
        )
