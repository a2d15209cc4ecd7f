"""What the memory and the operator allow, and the check of a request against it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.config import SchedulerConfig
from services.scheduler.prefix_cache import encode_salt
from shared.errors import ConfigError, RequestError
from shared.sampling import LogitRules, SamplingParams
from shared.wire import Memory, SubmitTokens


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len is the model's, or what the whole pool holds where that is less. max_step: seconds, 0 for no limit,
    None for the limit that ``Budgets`` finds.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_step: float | None = None
    max_num_queued_tokens: int | None = None
    max_queue_time: float = math.inf
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "recompute"
    host_blocks: int = 0
    tenant_weights: dict[str, float] = field(default_factory=dict)
    enable_prefix_caching: bool = True
    prefix_isolation: str = "none"

    @classmethod
    def build(cls, config: SchedulerConfig, memory: Memory) -> Limits:
        if config.preemption_mode != "recompute" and not memory.host_blocks:
            raise ConfigError(
                f"--preemption-mode {config.preemption_mode} needs host memory: start the worker with --swap-space"
            )
        return cls(
            num_blocks=memory.num_blocks,
            block_size=memory.block_size,
            max_model_len=min(memory.max_model_len, (memory.num_blocks - 1) * memory.block_size),
            vocab_size=memory.vocab_size,
            eos_ids=frozenset(memory.eos_ids),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_queued_reqs=config.max_num_queued_reqs,
            max_step=None if config.max_step_ms is None else config.max_step_ms / 1000,
            max_num_queued_tokens=config.max_num_queued_tokens,
            max_queue_time=math.inf if config.max_queue_time is None else config.max_queue_time,
            scheduling_policy=config.scheduling_policy,
            preemption_mode=config.preemption_mode,
            host_blocks=memory.host_blocks,
            tenant_weights=parse_weights(config.tenant_weights),
            enable_prefix_caching=config.enable_prefix_caching,
            prefix_isolation=config.prefix_isolation,
        )

    def salt(self, cache_salt: str, tenant: str) -> bytes:
        """What has to be equal, beside the tokens, for two requests to share blocks."""
        isolated = self.prefix_isolation == "tenant"
        return encode_salt(cache_salt=cache_salt, tenant=tenant if isolated else "")

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def check(self, message: SubmitTokens) -> int:
        """The request's max_tokens (what is left of the context when it names none).

        Raises RequestError (400) naming field, value and limit when it could never be completed.
        """
        sampling = message.sampling
        self._check_ids(message)
        self._check_sequences(message)
        if sampling.rules is not None:
            self._check_rules(sampling, sampling.rules)
        _check_ranges(
            ("temperature", sampling.temperature, 0 <= sampling.temperature < math.inf, "finite, at least 0"),
            ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
            ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "in [0, 1]"),
            ("top_k", sampling.top_k, 0 <= sampling.top_k < 1 << 31, "in [0, 2**31)"),
            ("seed", sampling.seed, 0 <= sampling.seed < 1 << 63, "in [0, 2**63)"),
            ("logprobs", sampling.logprobs, -1 <= sampling.logprobs <= self.vocab_size, "-1 or in the vocabulary"),
            (
                "prompt_logprobs",
                sampling.prompt_logprobs,
                -1 <= sampling.prompt_logprobs <= self.vocab_size,
                "-1 or in the vocabulary",
            ),
            ("timeout", message.timeout, 0 <= message.timeout < math.inf, "finite, at least 0"),
        )
        if message.priority and self.scheduling_policy != "priority":
            raise _invalid(
                "priority",
                f"priority is {message.priority}, but this server's scheduling policy is {self.scheduling_policy!r}; "
                f"only with 'priority' it has an effect",
                code="unsupported_value",
            )
        max_tokens = self._max_tokens(len(message.prompt_ids), sampling.max_tokens)
        if sampling.rules is not None and sampling.rules.min_tokens > max_tokens:
            raise _invalid("min_tokens", f"min_tokens is {sampling.rules.min_tokens}, above max_tokens ({max_tokens})")
        _check_generated(message, max_tokens)
        return max_tokens

    def _check_ids(self, message: SubmitTokens) -> None:
        if len(message.prompt_ids) == 0:
            raise _invalid("prompt", "the prompt has no tokens")
        for name, ids in (("prompt", message.prompt_ids), ("generated", message.generated)):
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
            if len(wrong):
                raise self._outside_vocabulary(name, int(wrong[0]))

    def _check_sequences(self, message: SubmitTokens) -> None:
        """How many sequences, and what does not go with beams, best_of and logprobs."""
        sampling, most = message.sampling, self.max_num_seqs
        if not 1 <= sampling.n <= most:
            raise _invalid("n", f"n is {sampling.n}, outside 1..{most} (max_num_seqs of this server)")
        if sampling.best_of and not sampling.n <= sampling.best_of <= most:
            raise _invalid(
                "best_of",
                f"best_of is {sampling.best_of}, outside n..{most} (n is {sampling.n}, the end is max_num_seqs of this "
                "server)",
            )
        if sampling.early_stopping not in ("true", "false", "never"):
            raise _invalid(
                "early_stopping", f"early_stopping is {sampling.early_stopping!r}, not true, false or 'never'"
            )
        if sampling.is_held and len(message.generated):
            raise _invalid("generated", "generated: a request with beams or best_of has no output before its end")
        if sampling.logprobs >= 0 or sampling.prompt_logprobs >= 0:
            if len(message.generated):
                raise _invalid("generated", "generated: a request with logprobs cannot go on from output")
            if sampling.use_beam_search and (sampling.prompt_logprobs >= 0 or sampling.logprob_token_ids):
                name = "prompt_logprobs" if sampling.prompt_logprobs >= 0 else "logprob_token_ids"
                raise _invalid(name, f"{name}: not with use_beam_search", code="unsupported_value")

    def _check_rules(self, sampling: SamplingParams, rules: LogitRules) -> None:
        """Raises RequestError (400) for rules out of range, and for those that leave nothing to sample."""
        if sampling.use_beam_search:
            raise _invalid(
                "use_beam_search",
                "use_beam_search: not with penalties, min_tokens, or rules about single tokens",
                code="unsupported_value",
            )
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", rules.logit_bias_ids),
            ("allowed_token_ids", rules.allowed_token_ids),
            ("bad_words", [id for word in rules.bad_words for id in word]),
        ):
            if wrong := [id for id in ids if not 0 <= id < self.vocab_size]:
                raise self._outside_vocabulary(name, wrong[0])
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_ids)}
        if rules.min_tokens and rules.allowed_token_ids and stops.issuperset(rules.allowed_token_ids):
            raise _invalid(
                "allowed_token_ids",
                f"allowed_token_ids: all of them end the output, but min_tokens is {rules.min_tokens}",
            )
        _check_ranges(
            ("presence_penalty", rules.presence_penalty, math.isfinite(rules.presence_penalty), "finite"),
            ("frequency_penalty", rules.frequency_penalty, math.isfinite(rules.frequency_penalty), "finite"),
            ("repetition_penalty", rules.repetition_penalty, 0 < rules.repetition_penalty < math.inf, "above 0"),
            ("typical_p", rules.typical_p, 0 < rules.typical_p <= 1, "in (0, 1]"),
            ("min_tokens", rules.min_tokens, rules.min_tokens >= 0, "at least 0"),
            ("logit_bias", rules.logit_bias, all(map(math.isfinite, rules.logit_bias)), "finite"),
        )

    def _max_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        left = self.max_model_len - prompt_tokens
        max_tokens = max(left, 1) if asked is None else asked
        if max_tokens < 1:
            raise _invalid("max_tokens", f"max_tokens is {max_tokens}, below 1")
        if max_tokens > left:
            raise _invalid(
                "max_tokens" if prompt_tokens < self.max_model_len else "prompt",
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the completion).",
                code="context_length_exceeded",
            )
        return max_tokens

    def _outside_vocabulary(self, name: str, id: int) -> RequestError:
        return _invalid(name, f"{name}: token id {id} is outside the vocabulary of {self.vocab_size}")

    def check_beams(self, prompt_tokens: int, max_tokens: int, width: int) -> None:
        """Raises RequestError (400) when the pool cannot hold all beams of a search at once, at their longest."""
        shared = prompt_tokens // self.block_size if self.enable_prefix_caching else 0
        each = self.blocks_for(prompt_tokens + max_tokens) - shared
        needed = shared + width * (each + 1)  # and each may have a copy of its last block in the making
        if needed > self.num_blocks - 1:
            raise _invalid(
                "n",
                f"{width} beams of {prompt_tokens + max_tokens} tokens need {needed} KV blocks, there are "
                f"{self.num_blocks - 1}: lower n or max_tokens",
            )

    def describe(self) -> str:
        tokens = (self.num_blocks - 1) * self.block_size
        return (
            f"{self.num_blocks - 1} usable KV blocks of {self.block_size} tokens: {tokens} tokens, "
            f"{tokens / self.max_model_len:.1f} requests of max_model_len {self.max_model_len}"
        )


def parse_weights(texts: list[str]) -> dict[str, float]:
    """Tenants' weights from NAME=WEIGHT. Raises ConfigError naming the one that is no such pair."""
    weights = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = math.nan
        if not ("=" in text and 0 < weights[name] < math.inf):
            raise ConfigError(f"--tenant-weights {text!r} is not NAME=WEIGHT with a number above 0")
    return weights


def _invalid(param: str, problem: str, code: str = "invalid_value") -> RequestError:
    return RequestError(problem, code=code, param=param)


def _check_ranges(*fields: tuple[str, object, bool, str]) -> None:
    """fields: name, value, whether it is valid, and what it must be."""
    for name, value, valid, rule in fields:
        if not valid:
            raise _invalid(name, f"{name} is {value}, not {rule}")


def _check_generated(message: SubmitTokens, max_tokens: int) -> None:
    """The counts cut the ids of a re-submission into sequences that are no longer than they may get."""
    counts, n = message.generated_counts, message.sampling.n
    if min(counts, default=0) < 0 or len(counts) > n or sum(counts) != len(message.generated):
        raise _invalid(
            "generated_counts",
            f"generated_counts {counts} do not cut {len(message.generated)} ids into {n} sequences",
        )
    if max(counts, default=0) > max_tokens:
        raise _invalid("generated_counts", f"generated_counts {counts} exceed max_tokens ({max_tokens})")


def split_generated(message: SubmitTokens) -> list[list[int]]:
    """Output ids that each of the request's n sequences already has."""
    counts = [*message.generated_counts, *[0] * (message.sampling.n - len(message.generated_counts))]
    ends = np.cumsum(counts)
    return [message.generated[end - count : end].tolist() for end, count in zip(ends, counts, strict=True)]
