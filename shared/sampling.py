"""How one request wants its tokens chosen, as it crosses the wires."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated by the gateway; every process after it may rely on the ranges given here.

    temperature: 0 is greedy. top_p: (0, 1], 1 is off. top_k: 0 is off. min_p: [0, 1], 0 is off. seed: 0..2**63-1,
    always set (the gateway draws one when the client gives none); sequence i of a group samples with seed + i.
    max_tokens: output tokens at most, at least 1; None until the tokenizer knows the prompt length (chat default: the
    rest of the context). n: sequences. stop_token_ids end a sequence like an EOS. ignore_eos: EOS ids do not end it.
    best_of: sequences that are computed, of which the n with the highest cumulative logprob are the answer; 0 means n.
    use_beam_search: the answer is the n best hypotheses of a search with n beams; length_penalty and early_stopping
    ("true", "false" or "never") are transformers'.
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

    @property
    def is_held(self) -> bool:
        """Whether which tokens are the answer is only known at the end of all sequences."""
        return self.use_beam_search or self.best_of > self.n
