"""Logprobs and rules of single requests, from the model to a client, held to transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from services.scheduler.grammar import Grammar
from services.worker import sampler
from services.worker.executor import Executor
from services.worker.model_executor import ModelExecutor
from shared.grammar import new_matcher
from shared.sampling import LogitRules
from tests.integration.server import Server, serve
from tests.services.scheduler.simulation import EOS
from tests.services.scheduler.test_logprobs import Told
from tests.services.worker import random_models

VOCAB, BLOCKS = 320, 160
PROMPTS = random_models.prompts(40, 75, 33)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelExecutor]:
    """transformers' random model, and an executor of the same weights."""
    folder = tmp_path_factory.mktemp("model")
    model = random_models.save(folder, "llama")
    return model, random_models.executor(folder)


class OnModel(Told):
    def __init__(self, executor: ModelExecutor, max_num_batched_tokens: int = 256) -> None:
        self._model = executor
        super().__init__(
            num_blocks=BLOCKS, max_model_len=256, vocab_size=VOCAB, max_num_batched_tokens=max_num_batched_tokens
        )

    def new_executor(self) -> Executor:
        return self._model


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Row p: log-probabilities of the token at position p + 1, in float64 of transformers' fp32 logits."""
    with torch.no_grad():
        found: torch.Tensor = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    return found


@pytest.mark.parametrize("tokens", [256, 23])
def test_logprobs_equal_transformers_for_prompts_and_outputs(oracle: tuple[Any, ModelExecutor], tokens: int) -> None:
    """Within 1e-4 in fp32, cold and with everything cached, whole and in chunks, all requests in one batch."""
    model, executor = oracle
    simulation = OnModel(executor, tokens)
    for round_ in range(2):
        for rid, prompt in enumerate(PROMPTS, 1 + 10 * round_):
            simulation.submit(rid, prompt, 8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
        simulation.drain()
    for rid, prompt in (*enumerate(PROMPTS, 1), *enumerate(PROMPTS, 11)):
        output = simulation.outputs[rid, 0]
        ids = prompt + output
        expected = logprobs_of(model, ids)
        told = [(position, one) for position, one in simulation.prompts[rid]]
        told += list(enumerate(simulation.told[rid, 0], len(prompt)))
        assert [position for position, _ in told] == list(range(1, len(ids)))
        for position, (sampled, rank, top_ids, top) in told:
            row = expected[position - 1]
            assert sampled == pytest.approx(float(row[ids[position]]), abs=1e-4)
            assert top == pytest.approx(row[top_ids].tolist(), abs=1e-4)
            assert top == pytest.approx(row.topk(len(top)).values.tolist(), abs=1e-4)
            assert int((row > row[ids[position]] + 2e-4).sum()) < rank <= int((row > row[ids[position]] - 2e-4).sum())


def test_logits_of_a_long_prompt_are_not_all_held_at_once(
    oracle: tuple[Any, ModelExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 5907 and 5067: the logits of a long prompt with prompt_logprobs took more memory than there was."""
    model, executor = oracle
    (prompt,) = random_models.prompts(200)
    rows = []
    logits = executor.decoder.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(sampler, "PROMPT_ROWS", 48)
    monkeypatch.setattr(executor.decoder, "logits", counted)
    simulation = OnModel(executor)
    simulation.submit(1, prompt, 1, ignore_eos=True, prompt_logprobs=1)
    simulation.drain()
    assert max(rows) == 48 and sum(rows) >= 199
    expected = logprobs_of(model, prompt)
    told = [sampled for _, (sampled, _, _, _) in simulation.prompts[1]]
    assert told == pytest.approx([float(expected[at, prompt[at + 1]]) for at in range(199)], abs=1e-4)


def test_logprobs_of_named_tokens_equal_transformers(oracle: tuple[Any, ModelExecutor]) -> None:
    """In the order in which they are named, beside a row that asks for the likeliest and one that asks for nothing."""
    model, executor = oracle
    simulation = OnModel(executor)
    named = [300, 2, 77]
    simulation.submit(1, PROMPTS[0], 6, ignore_eos=True, logprobs=3, logprob_token_ids=named)
    simulation.submit(2, PROMPTS[1], 6, ignore_eos=True, logprobs=1)
    simulation.submit(3, PROMPTS[2], 6, ignore_eos=True)
    simulation.drain()
    output = simulation.outputs[1, 0]
    expected = logprobs_of(model, PROMPTS[0] + output)
    for place, (sampled, _, ids, values) in enumerate(simulation.told[1, 0]):
        row = expected[len(PROMPTS[0]) + place - 1]
        assert ids == named and values == pytest.approx(row[named].tolist(), abs=1e-4)
        assert sampled == pytest.approx(float(row[output[place]]), abs=1e-4)
    for place, (sampled, _, ids, values) in enumerate(simulation.told[2, 0]):
        assert ids == [simulation.outputs[2, 0][place]] and values == [sampled]


class _Vocabulary:
    """For the random model: every byte is a token, so what a grammar forces is many of them."""

    eos_token_id, bos_token_id, special_token_ids = EOS, None, (0, 1, EOS)
    tokens = (
        *(b"<0>", b"<1>", b"<eos>"),
        *(bytes([byte]) for byte in range(256)),
        *(b"<%d>" % id for id in range(259, VOCAB)),
    )

    def __call__(self, text: bytes) -> list[int]:
        return [3 + byte for byte in text]


@pytest.fixture(scope="module")
def choices_and_runs() -> LLMatcher:
    vocabulary = LLTokenizer(TokenizerWrapper(_Vocabulary()), n_vocab=VOCAB, eos_token=EOS)
    return new_matcher(vocabulary, 'start: "beginning" (/[a-z]{2}/ ", and a run, "){4} "end"')


@pytest.mark.parametrize("tokens", [256, 23])
def test_logprobs_of_tokens_that_a_grammar_gives_equal_transformers(
    oracle: tuple[Any, ModelExecutor], choices_and_runs: LLMatcher, tokens: int
) -> None:
    """They are the model's own, as everywhere: of its distribution before the grammar."""
    model, executor = oracle
    simulation = OnModel(executor, tokens)
    for rid, prompt in enumerate(PROMPTS, 1):
        grammar = Grammar(choices_and_runs.deep_copy())
        simulation.submit(rid, prompt, 80, grammar=grammar, logprobs=2, temperature=1.0, seed=rid)
    simulation.drain()
    runs = [row.run for plan in simulation.plans for row in plan.new_rows if row.run is not None]
    assert max(len(run.tokens) for run in runs) >= len(", and a run, ")
    for rid, prompt in enumerate(PROMPTS, 1):
        output = simulation.outputs[rid, 0]
        assert len(output) == 9 + 4 * (2 + 13) + 3
        expected = logprobs_of(model, prompt + output)[len(prompt) - 1 :]
        for place, (token, (sampled, rank, top_ids, top)) in enumerate(
            zip(output, simulation.told[rid, 0], strict=True)
        ):
            row = expected[place]
            assert sampled == pytest.approx(float(row[token]), abs=1e-4)
            assert top == pytest.approx(row[top_ids].tolist(), abs=1e-4)
            assert int((row > row[token] + 2e-4).sum()) < rank <= int((row > row[token] - 2e-4).sum())


def test_logprobs_do_not_change_what_a_grammar_held_request_says(tmp_path: Path, choices_and_runs: LLMatcher) -> None:
    """In bf16 a run's bits are others than those of its tokens one by one, so both requests have to take runs."""
    random_models.save(tmp_path, "llama")
    executor = random_models.executor(tmp_path, dtype="bfloat16")
    said = []
    several: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"rules": LogitRules(min_tokens=1)}]
    for wishes in several:
        simulation = OnModel(executor)
        for rid, prompt in enumerate(PROMPTS, 1):
            grammar = Grammar(choices_and_runs.deep_copy())
            simulation.submit(rid, prompt, 80, grammar=grammar, temperature=1.5, seed=rid, **wishes)
        simulation.drain()
        said.append(simulation.outputs)
    assert said[0] == said[1] == said[2]


def test_greedy_outputs_under_rules_are_transformers(oracle: tuple[Any, ModelExecutor]) -> None:
    """Penalties of prompt and output, and words that must not come, in one batch with a row without rules."""
    model, executor = oracle
    prompt = PROMPTS[0]
    plain = OnModel(executor)
    plain.submit(1, prompt, 12, ignore_eos=True)
    plain.drain()
    words = [[plain.outputs[1, 0][2]], plain.outputs[1, 0][4:6]]
    rules = {
        2: LogitRules(repetition_penalty=1.5),
        3: LogitRules(bad_words=words),
        4: LogitRules(min_tokens=6),
    }
    asked: dict[int, dict[str, Any]] = {
        2: {"repetition_penalty": 1.5},
        3: {"bad_words_ids": words},
        4: {"min_new_tokens": 6, "eos_token_id": plain.outputs[1, 0][3]},
    }
    simulation = OnModel(executor)
    simulation.submit(1, prompt, 12, ignore_eos=True)
    for rid, one in rules.items():
        stops = [asked[rid]["eos_token_id"]] if rid == 4 else []
        simulation.submit(rid, prompt, 12, ignore_eos=True, rules=one, stop_token_ids=stops)
    simulation.drain()
    assert simulation.outputs[1, 0] == plain.outputs[1, 0]
    for rid, options in asked.items():
        options = {"eos_token_id": VOCAB + 1, **options}
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0, **options)
        assert simulation.outputs[rid, 0] == ids[0, len(prompt) :].tolist(), options
        assert simulation.outputs[rid, 0] != plain.outputs[1, 0]


def test_a_seeded_request_repeats_exactly_alone_and_among_others(oracle: tuple[Any, ModelExecutor]) -> None:
    """vLLM 51226: a seeded request could not be repeated beside neighbours that have no seed."""
    _, executor = oracle
    mixed: list[dict[str, Any]] = [
        {"temperature": 1.0, "rules": LogitRules(presence_penalty=1.0, frequency_penalty=0.5)},
        {"temperature": 0.8, "top_p": 0.9, "rules": LogitRules(typical_p=0.7)},
        {"temperature": 1.2, "top_k": 30, "rules": LogitRules(logit_bias_ids=[5, 6], logit_bias=[4.0, -4.0])},
        {"temperature": 1.0},
        {"temperature": 1.0, "rules": LogitRules(allowed_token_ids=list(range(10, 40)))},
    ]
    alone = []
    for rid, sampling in enumerate(mixed):
        simulation = OnModel(executor)
        simulation.submit(rid, PROMPTS[rid % 3], 10, ignore_eos=True, seed=40 + rid, **sampling)
        simulation.drain()
        alone.append(simulation.outputs[rid, 0])
    together = OnModel(executor, 31)
    for rid, sampling in reversed(list(enumerate(mixed))):
        together.submit(rid, PROMPTS[rid % 3], 10, ignore_eos=True, seed=40 + rid, **sampling)
    for _ in range(9):
        together.round()
    together.receive()
    together.restart()  # all are computed again, from prompt and output
    together.drain()
    assert [together.outputs[rid, 0] for rid in range(len(mixed))] == alone
    assert set(alone[4]) <= set(range(10, 40))


# ---- a whole server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("logprobs"), "--dtype", "float32", "--max-model-len", "512") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        yield client


def test_openai_client_sees_chat_logprobs_whole_and_streamed(server: Server, client: openai.OpenAI) -> None:
    """The tokens' own bytes joined are the text, also of emoji and Chinese."""
    asked: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Repeat exactly: 😀 世界 “hi”"}],
        "temperature": 0,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**asked)
    choice = whole.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None and whole.usage is not None
    content = choice.logprobs.content
    assert len(content) == whole.usage.completion_tokens
    joined = b"".join(bytes(one.bytes or []) for one in content)
    text = choice.message.content or ""
    assert joined.decode(errors="ignore").startswith(text.rstrip("\N{REPLACEMENT CHARACTER}")) and text
    for one in content:
        assert len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob
        assert one.logprob == one.top_logprobs[0].logprob  # greedy
        assert one.token.encode() == bytes(one.bytes or []) or "\\x" in one.token
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices and chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [one.token for one in streamed] == [one.token for one in content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in content], abs=1e-4)


def test_openai_client_sees_an_echo_without_output(server: Server, client: openai.OpenAI) -> None:
    """vLLM 6521; perplexity as evaluation harnesses compute it. The same from a cache that holds the prompt."""
    prompt = "The capital of France is Paris, and 世界 is a word 😀."
    found = []
    for _ in range(2):
        answer = client.completions.create(model=server.model, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
        choice = answer.choices[0]
        assert answer.usage is not None and choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert (choice.text, answer.usage.completion_tokens) == (prompt, 0)
        assert choice.logprobs.tokens is not None and len(choice.logprobs.tokens) == answer.usage.prompt_tokens
        assert choice.logprobs.token_logprobs[0] is None
        assert all(one is not None and one <= 0 for one in choice.logprobs.token_logprobs[1:])
        found.append(choice.logprobs.token_logprobs[1:])
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    more = client.completions.create(model=server.model, prompt=prompt, echo=True, max_tokens=3, logprobs=0, seed=1)
    logprobs = more.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.text_offset is not None
    assert logprobs.token_logprobs[1 : 1 + len(found[0])] == pytest.approx(found[0], abs=1e-4)
    assert more.choices[0].text.startswith(prompt) and logprobs.text_offset[len(found[0]) + 1] == len(prompt)


def test_rules_of_requests_change_what_comes(server: Server, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": server.model, "prompt": "Paris is the capital of", "temperature": 0}
    plain = client.completions.create(**asked, max_tokens=4, logprobs=0)
    assert "United" in plain.choices[0].text
    banned = client.completions.create(**asked, max_tokens=4, extra_body={"bad_words": ["United"]})
    assert "United" not in banned.choices[0].text
    allowed = client.completions.create(
        **asked, max_tokens=5, extra_body={"allowed_token_ids": [100, 101], "return_token_ids": True}
    )
    assert set(allowed.choices[0].model_extra["token_ids"]) <= {100, 101}  # type: ignore[index]
    biased = client.completions.create(
        **asked, max_tokens=3, logit_bias={"105": 100}, extra_body={"return_token_ids": True}
    )
    assert biased.choices[0].model_extra["token_ids"] == [105] * 3  # type: ignore[index]
    long = client.completions.create(**asked, max_tokens=40, stop=["."], extra_body={"min_tokens": 30})
    assert long.usage is not None and long.usage.completion_tokens >= 30
    with pytest.raises(openai.BadRequestError, match="key 999999 is outside the vocabulary"):
        client.completions.create(**asked, logit_bias={"999999": 1})
    assert not math.isnan(plain.choices[0].logprobs.token_logprobs[0])  # type: ignore[union-attr, index, arg-type]
