"""How one request wants its tokens chosen, as it crosses the wires."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What changes a request's logits before a token is chosen; most requests have none of it.

    Penalties are OpenAI's and transformers': presence_penalty and frequency_penalty of output tokens, each -2..2, 0 is
    off; repetition_penalty of prompt and output tokens, above 0, 1 is off. typical_p: (0, 1], 1 is off. min_tokens:
    output tokens before which no EOS and no stop token id is sampled. logit_bias: -100..100, added to the logits of
    logit_bias_ids. allowed_token_ids: nothing else is sampled; empty: no limit. bad_words: token sequences that are not
    completed in the output; the tokenizer fills them in.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    typical_p: float = 1.0
    min_tokens: int = 0
    logit_bias_ids: list[int] = field(default_factory=list)
    logit_bias: list[float] = field(default_factory=list)
    allowed_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def can_forbid(self) -> bool:
        """Whether some token may have no chance, even where it is the only one that a grammar allows.

        A bias is finite, so it leaves that one its chance.
        """
        return bool(self.min_tokens or self.allowed_token_ids or self.bad_words)

    def may_forbid(self, token: int, output: list[int], stop_ids: frozenset[int]) -> bool:
        """Whether ``token`` may have no chance behind ``output``."""
        if self.allowed_token_ids and token not in self.allowed_token_ids:
            return True
        if len(output) < self.min_tokens and token in stop_ids:
            return True
        ends = (word for word in self.bad_words if word[-1] == token)
        return any(len(word) == 1 or output[1 - len(word) :] == word[:-1] for word in ends)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What requests get that leave a field out: the model's generation_config.json as the operator wants it.

    Fields are those of SamplingParams and LogitRules, None where the neutral value stands. max_tokens: at most the rest
    of the context.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name} {value}" for name, value in given if value is not None) or "neutral"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated by the gateway; every process after it may rely on the ranges given here.

    temperature: 0 is greedy. top_p: (0, 1], 1 is off. top_k: 0 is off. min_p: [0, 1], 0 is off. seed: 0..2**63-1,
    always set (the gateway draws one when the client gives none); sequence i of a group samples with seed + i.
    max_tokens: output tokens at most, at least 1; None until the tokenizer knows the prompt length (chat default: the
    rest of the context). n: sequences. stop_token_ids end a sequence like an EOS. ignore_eos: EOS ids do not end it.
    best_of: sequences that are computed, of which the n with the highest cumulative logprob are the answer; 0 means n.
    use_beam_search: the answer is the n best hypotheses of a search with n beams; length_penalty and early_stopping
    ("true", "false" or "never") are transformers'. logprobs, prompt_logprobs: how many of the likeliest tokens are told
    beside each output token, or each prompt token from the second on; -1: none. logprob_token_ids: these are told
    beside each output token in place of the likeliest; ``logprobs`` is their number. rules: None when there are none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    n: int = 1
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    best_of: int = 0
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: str = "false"
    logprobs: int = -1
    prompt_logprobs: int = -1
    rules: LogitRules | None = None
    logprob_token_ids: list[int] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Whether which tokens are the answer is only known at the end of all sequences."""
        return self.use_beam_search or self.best_of > self.n
