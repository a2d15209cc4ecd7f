"""Structured output through the whole server, on a random model: it writes what the grammar allows, however unlikely.

A model that wants nothing takes every way that a grammar leaves open, which one that means well does not.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from shared.models import locate
from tests.integration.json_schemas import record, schemas
from tests.integration.server import Server, serve
from tests.services.worker import random_models

AT_ONCE = 48
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
CHECKED_FORMATS = ["date", "uuid", "ipv4", "ipv6"]  # those that jsonschema checks by itself
SHAPE = {
    "vocab_size": 49_152,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the built-in model's vocabulary."""
    folder = tmp_path_factory.mktemp("random")
    random_models.save(folder, "llama", **SHAPE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(locate("").folder / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    argv = (str(folder), "--dtype", "float32", "--kv-cache-memory-bytes", "16MiB", "--max-num-seqs", str(AT_ONCE))
    with serve(tmp_path_factory.mktemp("structured"), *argv) as server:
        yield server


def ask_all(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        places = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:

            async def one(body: dict[str, Any]) -> dict[str, Any]:
                async with places:
                    answer = await client.post("/v1/completions", json={"prompt": "Answer:", **body})
                    return {"status": answer.status_code, **answer.json()}

            return await asyncio.gather(*map(one, bodies))

    return asyncio.run(main())


def ask(server: Server, **body: Any) -> dict[str, Any]:
    return ask_all(server, [body])[0]


def wish(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_two_hundred_schemas(server: Server) -> None:
    """Every reply that its grammar has ended is valid, and nearly all end so."""
    wanted = schemas()
    bodies = [{"response_format": wish(one), "max_tokens": 400, "seed": seed} for seed, one in enumerate(wanted)]
    answers = ask_all(server, bodies)
    ended, pretty = 0, 0
    for schema, answer in zip(wanted, answers, strict=True):
        assert answer["status"] == 200, answer
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            ended += 1
            pretty += "\n" in choice["text"]
            checker = jsonschema.FormatChecker(CHECKED_FORMATS)
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(choice["text"]))
    assert ended >= 196 and not pretty
    assert len({answer["choices"][0]["text"] for answer in answers}) > 120


def test_each_form_is_followed(server: Server) -> None:
    phone = {"max_tokens": 60, "n": 3, "seed": 7}
    forms: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"regex": r"\d{3}-\d{4}"}}, "[0-9]{3}-[0-9]{4}"),
        ({"guided_regex": "(ab|cd){2,4}"}, "(ab|cd){2,4}"),
        ({"structured_outputs": {"choice": ["red", "green", 'blue "sky"']}}, 'red|green|blue "sky"'),
        ({"guided_choice": ["one way only"]}, "one way only"),
        ({"structured_outputs": {"grammar": 'start: "f(" NUMBER ")"\nNUMBER: /[0-9]{1,5}/'}}, r"f\([0-9]{1,5}\)"),
        ({"guided_grammar": 'root ::= "x" [yz] "x"'}, "x[yz]x"),
        ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, "1|2"),
        ({"guided_json": {"const": "c"}}, '"c"'),
        (
            {"structured_outputs": {"json": {"type": "array", "items": SMALL}, "disable_any_whitespace": True}},
            r"\[([0-9](,[0-9])*)?\]",
        ),
    ]
    for (extra, pattern), answer in zip(
        forms, ask_all(server, [{**phone, **extra} for extra, _ in forms]), strict=True
    ):
        assert answer["status"] == 200, answer
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                assert re.fullmatch(pattern, choice["text"], re.DOTALL), (extra, choice["text"])
        assert any(choice["finish_reason"] == "stop" for choice in answer["choices"]), extra


def test_a_stream_equals_the_whole_answer(server: Server) -> None:
    """With runs that come in one piece, for one sample and for several, and cut by max_tokens."""
    schema = record(first_name={"type": "string", "maxLength": 12}, favourite_colours={"type": "array", "maxItems": 3})
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for max_tokens, n in ((200, 1), (200, 3), (9, 2), (1, 1)):
        body: dict[str, Any] = {
            "model": server.model,
            "prompt": "A person:",
            "max_tokens": max_tokens,
            "n": n,
            "seed": 5,
            "extra_body": {"response_format": wish(schema)},
        }
        whole = client.completions.create(**body)
        texts, reasons = dict[int, str](), dict[int, str]()
        for chunk in client.completions.create(**body, stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert [texts.get(choice.index, "") for choice in whole.choices] == [choice.text for choice in whole.choices]
        assert [reasons[choice.index] for choice in whole.choices] == [choice.finish_reason for choice in whole.choices]
        for choice in whole.choices:
            if choice.finish_reason == "stop":
                jsonschema.validate(json.loads(choice.text), schema)


def test_logprobs_change_nothing_and_are_there_for_every_token(server: Server) -> None:
    """Runs are sampled token by token then: the same tokens."""
    body = {"response_format": wish(record(a_long_name_without_choice={"type": "boolean"})), "seed": 3}
    body |= {"max_tokens": 100, "return_token_ids": True}
    plain, told = ask_all(server, [body, {**body, "logprobs": 2}])
    assert plain["choices"][0]["token_ids"] == told["choices"][0]["token_ids"]
    assert len(told["choices"][0]["logprobs"]["token_logprobs"]) == len(told["choices"][0]["token_ids"])


def test_preemption_changes_nothing(folder: Path, server: Server, tmp_path: Path) -> None:
    """A pool that is too small for all: rows lose their memory and come back, swapped or computed again."""
    schema = {"type": "array", "items": record(key={"type": "string", "maxLength": 9}), "minItems": 3, "maxItems": 3}
    bodies = [{"response_format": wish(schema), "max_tokens": 150, "seed": seed} for seed in range(12)]
    expected = [answer["choices"][0]["text"] for answer in ask_all(server, bodies)]
    few = ("--num-gpu-blocks-override", "24", "--max-model-len", "256", "--swap-space", "1MiB")
    argv = (str(folder), "--dtype", "float32", "--preemption-mode", "auto", *few)
    with serve(tmp_path, *argv) as small:
        assert [answer["choices"][0]["text"] for answer in ask_all(small, bodies)] == expected
        assert small.metric("vllm:num_preemptions_total") > 0


def test_what_contradicts_the_grammar_is_an_error_of_that_request(server: Server) -> None:
    impossible = {"structured_outputs": {"regex": "[ab]+x"}, "allowed_token_ids": [1000, 1001]}
    hard = {"structured_outputs": {"regex": "[0-9]{5}"}, "min_tokens": 16, "ignore_eos": True}
    free = {"max_tokens": 5, "structured_outputs": {"regex": "a*"}, "ignore_eos": True}
    failed, complete, cut = ask_all(server, [impossible, hard, free])
    assert (failed["status"], failed["error"]["code"]) == (400, "grammar_failed")
    assert "leave no token" in failed["error"]["message"]
    assert complete["choices"][0]["finish_reason"] == "stop"  # the grammar wins: nothing may follow
    assert re.fullmatch("[0-9]{5}", complete["choices"][0]["text"])
    assert cut["choices"][0]["finish_reason"] == "length"


def test_what_is_forbidden_stays_so_where_the_grammar_leaves_no_choice(server: Server) -> None:
    only: dict[str, Any] = {"structured_outputs": {"regex": "[ab] red apple[ab]"}, "logprobs": 0, "seed": 1}
    only["return_token_ids"] = True
    ids = ask(server, **only)["choices"][0]["token_ids"]
    rules: list[dict[str, Any]] = [{"bad_words": ["red"]}, {"allowed_token_ids": [ids[0]]}]
    for rule in rules:
        for whole in (only, {"structured_outputs": only["structured_outputs"], "seed": 1}):
            answer = ask(server, **whole, **rule)
            assert answer["status"] == 400 and answer["error"]["code"] == "grammar_failed", (rule, answer)


def test_a_bad_grammar_is_refused_and_the_server_lives(server: Server) -> None:
    """vllm #43920, #17313: 400, before and after a good one; vllm #54003: one that compiles for ever, too."""
    good = {"structured_outputs": {"choice": ["fine"]}}
    dear = {"structured_outputs": {"json": {"type": "integer", "multipleOf": 999_983}}}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"response_format": wish({"type": "strin"})}, "response_format.json_schema.schema"),
        ({"response_format": wish({"not": {}})}, "response_format.json_schema.schema"),
        (dear, "structured_outputs.json"),
    ]
    answers = ask_all(server, [good, *(body for body, _ in bad), good])
    assert [answer["status"] for answer in answers] == [200, *[400] * len(bad), 200]
    assert [answer["error"]["param"] for answer in answers[1:-1]] == [param for _, param in bad]
    assert [answer["choices"][0]["text"] for answer in (answers[0], answers[-1])] == ["fine", "fine"]


def test_json_mode_through_the_openai_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(
        model=server.model,
        messages=messages,
        response_format={"type": "json_object"},
        max_tokens=300,
        seed=1,
    )
    content = answer.choices[0].message.content or ""
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)
