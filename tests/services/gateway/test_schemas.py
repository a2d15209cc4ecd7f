"""Requests as the sampling parameters that leave the gateway."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from services.gateway.chat_schema import ChatRequest
from services.gateway.model import Limits
from services.gateway.schemas import CompletionRequest, validate
from shared.errors import RequestError
from shared.sampling import LogitRules, SamplingDefaults, SamplingParams

LIMITS = Limits(vocab_size=100, max_model_len=512)
DEFAULTS = SamplingDefaults(0.6, 0.95, 20, 0.05, 1.1, 0.5, -0.5, 64)


def completion(limits: Limits = LIMITS, **body: Any) -> SamplingParams:
    asked = validate(CompletionRequest, {"prompt": "a", "seed": 1, **body}, limits)
    asked.check()
    return asked.sampling(limits)


def chat(limits: Limits = LIMITS, **body: Any) -> SamplingParams:
    messages = [{"role": "user", "content": "a"}]
    asked = validate(ChatRequest, {"messages": messages, "seed": 1, **body}, limits)
    asked.check()
    return asked.sampling(limits)


def test_the_models_defaults_stand_for_fields_that_are_left_out() -> None:
    limits = replace(LIMITS, defaults=DEFAULTS)
    found = completion(limits)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.95, 20, 0.05)
    assert found.rules == LogitRules(presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1)
    assert found.max_tokens == 16  # OpenAI's default of this endpoint, which vLLM keeps too
    assert chat(limits).max_tokens is None  # the tokenizer, which knows what room there is, fills it in


def test_a_request_overrides_each_default_also_with_a_neutral_value() -> None:
    given = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    found = completion(replace(LIMITS, defaults=DEFAULTS), **given)
    assert found == completion(**given) and found.rules is None and found.temperature == 0


def test_a_top_p_of_0_leaves_the_likeliest_token() -> None:
    """OpenAI allows it. The likeliest of 2**20 tokens has a larger share than this."""
    assert 0 < completion(LIMITS, top_p=0).top_p < 2**-20


def test_null_is_left_out() -> None:
    limits = replace(LIMITS, defaults=DEFAULTS)
    assert completion(limits, **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"))) == completion(limits)


def test_a_beam_search_knows_no_defaults_of_sampling() -> None:
    limits = replace(LIMITS, defaults=DEFAULTS)
    assert completion(limits, use_beam_search=True, n=2) == completion(use_beam_search=True, n=2)


def test_without_defaults_sampling_is_neutral() -> None:
    assert asdict(completion()) == asdict(SamplingParams(seed=1, max_tokens=16))


def test_logprobs_of_named_tokens() -> None:
    assert (completion(logprob_token_ids=[5, 7]).logprobs, chat(logprob_token_ids=[5]).logprobs) == (2, 1)
    assert completion(logprob_token_ids=[5, 7], logprobs=2).logprob_token_ids == [5, 7]
    assert chat(logprob_token_ids=[5, 7], logprobs=True).logprobs == 2
    echoed = completion(logprob_token_ids=[5, 7], echo=True)
    assert (echoed.logprobs, echoed.prompt_logprobs) == (2, 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"logprob_token_ids": []}, "a list of 1 to 128 token ids"),
        ({"logprob_token_ids": [1] * 129}, "a list of 1 to 128 token ids, got a list of 129"),
        ({"logprob_token_ids": [4, 4]}, "holds a token id twice"),
        # sglang PR 28088: out-of-vocabulary ids of token_ids_logprob killed the engine
        ({"logprob_token_ids": [100]}, r"item \[0\] is token id 100, outside the vocabulary of 100"),
        (
            {"logprob_token_ids": [1, 2], "logprobs": 5},
            "2 ids take the place of the likeliest tokens, of which 5",
        ),
    ],
)
def test_named_tokens_that_cannot_be(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        completion(**body)
    assert caught.value.param == "logprob_token_ids" and caught.value.status == 400


def asked_chat(**body: Any) -> ChatRequest:
    asked = validate(ChatRequest, {"messages": [{"role": "user", "content": "a"}], **body}, LIMITS)
    asked.check()
    return asked


def test_effort_and_verbosity_are_variables_of_the_template() -> None:
    assert asked_chat(reasoning_effort="low").template_variables == {"reasoning_effort": "low"}
    quiet = asked_chat(reasoning_effort="none", verbosity="high", chat_template_kwargs={"verbosity": "low", "x": 1})
    assert quiet.template_variables == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "verbosity": "low",
        "x": 1,
    }
    with pytest.raises(RequestError, match=r"reasoning_effort: .*got 'some'") as caught:
        asked_chat(reasoning_effort="some")
    assert caught.value.param == "reasoning_effort"


def test_only_allowed_tools_are_tools() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    allowed = {"mode": "required", "tools": [tools[2], tools[0]]}
    use = asked_chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}).tool_use
    assert use is not None and use.choice == "required"
    assert [tool["function"]["name"] for tool in use.tools] == ["a", "c"]
    allowed["tools"] = [{"type": "function", "function": {"name": "d"}}]
    with pytest.raises(RequestError, match="'d' is not among the tools") as caught:
        asked_chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}).tool_use  # noqa: B018
    assert caught.value.param == "tool_choice.allowed_tools.tools.0.function.name"
