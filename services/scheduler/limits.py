"""What the memory and the operator allow, and the check of a request against it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.config import SchedulerConfig
from services.scheduler.prefix_cache import encode_salt
from shared.errors import ConfigError, RequestError
from shared.sampling import SamplingParams
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
        sampling, prompt = message.sampling, message.prompt_ids
        if len(prompt) == 0:
            raise RequestError("the prompt has no tokens", code="invalid_value", param="prompt")
        for name, ids in (("prompt", prompt), ("generated", message.generated)):
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
            if len(wrong):
                raise RequestError(
                    f"{name}: token id {int(wrong[0])} is outside the vocabulary of {self.vocab_size}",
                    code="invalid_value",
                    param=name,
                )
        if not 1 <= sampling.n <= self.max_num_seqs:
            raise RequestError(
                f"n is {sampling.n}, outside 1..{self.max_num_seqs} (max_num_seqs of this server)",
                code="invalid_value",
                param="n",
            )
        if sampling.best_of and not sampling.n <= sampling.best_of <= self.max_num_seqs:
            raise RequestError(
                f"best_of is {sampling.best_of}, outside n..{self.max_num_seqs} (n is {sampling.n}, the end is "
                "max_num_seqs of this server)",
                code="invalid_value",
                param="best_of",
            )
        if sampling.early_stopping not in ("true", "false", "never"):
            raise RequestError(
                f"early_stopping is {sampling.early_stopping!r}, not true, false or 'never'",
                code="invalid_value",
                param="early_stopping",
            )
        if sampling.is_held and len(message.generated):
            raise RequestError(
                "generated: a request with beams or best_of has no output before its end",
                code="invalid_value",
                param="generated",
            )
        self._check_rules(sampling)
        if sampling.logprobs >= 0 or sampling.prompt_logprobs >= 0:
            if len(message.generated):
                raise RequestError(
                    "generated: a request with logprobs cannot go on from output",
                    code="invalid_value",
                    param="generated",
                )
            if sampling.use_beam_search:
                raise RequestError("logprobs: not with use_beam_search", code="unsupported_value", param="logprobs")
        for name, value, valid, rule in (
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
        ):
            if not valid:
                raise RequestError(f"{name} is {value}, not {rule}", code="invalid_value", param=name)
        if message.priority and self.scheduling_policy != "priority":
            raise RequestError(
                f"priority is {message.priority}, but this server's scheduling policy is {self.scheduling_policy!r}; "
                f"only with 'priority' it has an effect",
                code="unsupported_value",
                param="priority",
            )
        if not 0 <= message.timeout < math.inf:
            raise RequestError(
                f"timeout is {message.timeout}, not finite, at least 0", code="invalid_value", param="timeout"
            )
        left = self.max_model_len - len(prompt)
        max_tokens = max(left, 1) if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}, below 1", code="invalid_value", param="max_tokens")
        if max_tokens > left:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{len(prompt) + max_tokens} tokens ({len(prompt)} in the prompt, {max_tokens} in the completion).",
                code="context_length_exceeded",
                param="max_tokens" if len(prompt) < self.max_model_len else "prompt",
            )
        counts = message.generated_counts
        if min(counts, default=0) < 0 or len(counts) > sampling.n or sum(counts) != len(message.generated):
            raise RequestError(
                f"generated_counts {counts} do not cut {len(message.generated)} ids into {sampling.n} sequences",
                code="invalid_value",
                param="generated_counts",
            )
        if sampling.rules is not None and sampling.rules.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {sampling.rules.min_tokens}, above max_tokens ({max_tokens})",
                code="invalid_value",
                param="min_tokens",
            )
        if max(counts, default=0) > max_tokens:
            raise RequestError(
                f"generated_counts {counts} exceed max_tokens ({max_tokens})",
                code="invalid_value",
                param="generated_counts",
            )
        return max_tokens

    def _check_rules(self, sampling: SamplingParams) -> None:
        """Raises RequestError (400) for rules out of range, and for those that leave nothing to sample."""
        rules = sampling.rules
        if rules is None:
            return
        if sampling.use_beam_search:
            raise RequestError(
                "use_beam_search: not with penalties, min_tokens, or rules about single tokens",
                code="unsupported_value",
                param="use_beam_search",
            )
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_ids)}
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", rules.logit_bias_ids),
            ("allowed_token_ids", rules.allowed_token_ids),
            ("bad_words", [id for word in rules.bad_words for id in word]),
        ):
            if wrong := [id for id in ids if not 0 <= id < self.vocab_size]:
                raise RequestError(
                    f"{name}: token id {wrong[0]} is outside the vocabulary of {self.vocab_size}",
                    code="invalid_value",
                    param=name,
                )
        if rules.min_tokens and rules.allowed_token_ids and stops.issuperset(rules.allowed_token_ids):
            raise RequestError(
                f"allowed_token_ids: all of them end the output, but min_tokens is {rules.min_tokens}",
                code="invalid_value",
                param="allowed_token_ids",
            )
        for name, value, valid, rule in (
            ("presence_penalty", rules.presence_penalty, math.isfinite(rules.presence_penalty), "finite"),
            ("frequency_penalty", rules.frequency_penalty, math.isfinite(rules.frequency_penalty), "finite"),
            ("repetition_penalty", rules.repetition_penalty, 0 < rules.repetition_penalty < math.inf, "above 0"),
            ("typical_p", rules.typical_p, 0 < rules.typical_p <= 1, "in (0, 1]"),
            ("min_tokens", rules.min_tokens, rules.min_tokens >= 0, "at least 0"),
            ("logit_bias", rules.logit_bias, all(map(math.isfinite, rules.logit_bias)), "finite"),
        ):
            if not valid:
                raise RequestError(f"{name} is {value}, not {rule}", code="invalid_value", param=name)

    def check_beams(self, prompt_tokens: int, max_tokens: int, width: int) -> None:
        """Raises RequestError (400) when the pool cannot hold all beams of a search at once, at their longest."""
        shared = prompt_tokens // self.block_size if self.enable_prefix_caching else 0
        each = self.blocks_for(prompt_tokens + max_tokens) - shared
        needed = shared + width * (each + 1)  # and each may have a copy of its last block in the making
        if needed > self.num_blocks - 1:
            raise RequestError(
                f"{width} beams of {prompt_tokens + max_tokens} tokens need {needed} KV blocks, there are "
                f"{self.num_blocks - 1}: lower n or max_tokens",
                code="invalid_value",
                param="n",
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


def split_generated(message: SubmitTokens) -> list[list[int]]:
    """Output ids that each of the request's n sequences already has."""
    counts = [*message.generated_counts, *[0] * (message.sampling.n - len(message.generated_counts))]
    ends = np.cumsum(counts)
    return [message.generated[end - count : end].tolist() for end, count in zip(ends, counts, strict=True)]
