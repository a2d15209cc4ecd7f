"""How prompts are answered, as a Python program says it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The fields of a request's body, under the names that vLLM's class of this name has; None leaves one out.

    The server checks them, and fills in the model's own defaults (generation_config.json) for what is left out.
    ``max_tokens``: 16 for text prompts, the rest of the context for chats. ``logprobs``: likeliest tokens told beside
    each output token.
    """

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    structured_outputs: dict[str, Any] | None = None
    extra_body: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """As the fields of a request; ``extra_body`` adds any that have no name here.

        Raises ValueError for a number that JSON has not, which would else be taken for a field that is left out.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "extra_body"}
        for name, value in given.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}: {value} is no finite number")
        body = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias is not None:
            body["logit_bias"] = {str(id): bias for id, bias in self.logit_bias.items()}
        return {**body, **(self.extra_body or {})}
