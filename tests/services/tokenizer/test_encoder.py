"""What becomes of a SUBMIT_TEXT before the scheduler sees it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from services.tokenizer import encoder as module
from services.tokenizer.encoder import Encoder, Prompt
from services.tokenizer.grammars import Grammars
from services.tokenizer.parsers.output import OutputFormat
from services.tokenizer.tokenizer import Tokenizer
from shared.codec import int32
from shared.errors import RequestError
from shared.grammar import GrammarSpec
from shared.sampling import SamplingParams
from shared.wire import SubmitText, ToolUse, Welcome

LIMITS = Welcome(1, 0, 16, 100, 2048, 401, [1], "digest")
NO_FOLDER = Path("none")  # no grammar is compiled here


@pytest.fixture
def encoder(chatty: Tokenizer) -> Iterator[Encoder]:
    encoder = Encoder(chatty, Grammars(NO_FOLDER), 2)
    yield encoder
    encoder.close()


def submit(max_tokens: int | None = 16, **fields: Any) -> SubmitText:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=fields.pop("stop_token_ids", []))
    endpoint = "chat" if "messages" in fields else "completions"
    return SubmitText(rid=1, request_id="r", endpoint=endpoint, sampling=sampling, **fields)


def encode(encoder: Encoder, message: SubmitText, limits: Welcome = LIMITS) -> Prompt:
    return asyncio.run(encoder.prompt(message, limits))


def refusal(encoder: Encoder, message: SubmitText, limits: Welcome = LIMITS) -> RequestError:
    with pytest.raises(RequestError) as caught:
        encode(encoder, message, limits)
    return caught.value


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_context_is_counted_exactly(encoder: Encoder) -> None:
    """2,038 tokens and 10 more just fit 2,048; one more of either does not."""
    fits = submit(10, prompt_ids=int32([7] * 2038))
    assert encode(encoder, fits).max_tokens == 10
    error = refusal(encoder, submit(11, prompt_ids=int32([7] * 2038)))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    assert error.message == (
        "This model's maximum context length is 2048 tokens. However, you requested 2049 tokens "
        "(2038 in the prompt, 11 in the completion). Please reduce the length of the prompt or completion."
    )
    assert encode(encoder, submit(None, prompt_ids=int32([7] * 2047))).max_tokens == 1
    full = refusal(encoder, submit(None, prompt_ids=int32([7] * 2048)))
    assert full.code == "context_length_exceeded"
    assert "resulted in 2048 tokens, which leaves no room" in full.message


def test_max_tokens_are_clamped_where_the_api_wants_it(encoder: Encoder) -> None:
    """Programs for Anthropic's API ask for the most that any answer may need, whatever the prompt."""
    for wanted, given in ((32_000, 48), (49, 48), (48, 48), (9, 9)):
        message = submit(wanted, prompt_ids=int32([7] * 2000), clamp_max_tokens=True)
        assert encode(encoder, message).max_tokens == given
    full = refusal(encoder, submit(9, prompt_ids=int32([7] * 2048), clamp_max_tokens=True))
    assert full.code == "context_length_exceeded" and "leaves no room" in full.message


def test_chat_gets_the_rest_of_the_context(encoder: Encoder, byte_level: Library) -> None:
    prompt = encode(encoder, submit(None, messages=user("Hello")))
    expected = byte_level.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n").ids
    assert prompt.ids.tolist() == expected
    assert prompt.max_tokens == 2048 - len(expected)


def test_a_text_that_cannot_fit_is_never_encoded(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: Any) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr(Tokenizer, "encode", unexpected)
    for message in (submit(prompt="x" * 5_000_000), submit(messages=user("x" * 5_000_000))):
        error = refusal(encoder, message)
        assert error.code == "context_length_exceeded"
        assert "at least" in error.message and "maximum context length is 2048" in error.message


def test_text_parts_are_joined(encoder: Encoder) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert encode(encoder, submit(messages=user(parts))).ids.tolist() == (
        encode(encoder, submit(messages=user("Hel\nlo"))).ids.tolist()
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages.0"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        (user(5), "messages.0.content"),
        (user([5]), "messages.0.content.0"),
        (user([{"type": "image_url", "image_url": {}}]), "messages.0.content.0.type"),
        (user([{"type": "text", "text": None}]), "messages.0.content.0.text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0.function"),
        ([{"role": "assistant", "tool_calls": [{"id": 5, "function": {}}]}], "messages.0.tool_calls.0.id"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}], "messages.0.tool_calls.0.function.name"),
        (user("lone \ud800 surrogate"), "messages"),
    ],
)
def test_malformed_messages_are_named(encoder: Encoder, messages: list[Any], param: str) -> None:
    error = refusal(encoder, submit(messages=messages))
    assert (error.status, error.param) == (400, param)
    assert param in error.message


def test_other_refusals(encoder: Encoder, byte_level: Library) -> None:
    raised = refusal(encoder, submit(messages=[{"role": "pirate", "content": "arr"}]))
    assert (raised.code, raised.param) == ("chat_template_error", "messages")
    for bad in (-1, 401):
        error = refusal(encoder, submit(prompt_ids=int32([5, bad])))
        assert (error.code, error.param) == ("invalid_token_id", "prompt")
        assert f"token id {bad}, outside the model's vocabulary of 401" in error.message
    added = replace(LIMITS, vocab_size=byte_level.token_to_id("<tool→>"))
    assert refusal(encoder, submit(prompt="a <tool→> that the model has no row for"), added).code == "invalid_token_id"
    assert refusal(encoder, submit(prompt="x", stop_token_ids=[401])).param == "stop_token_ids"
    assert refusal(encoder, submit(prompt="lone \ud800")).param == "prompt"
    assert refusal(encoder, submit(prompt_ids=int32([]))).param == "prompt"
    assert refusal(encoder, submit(prompt="x", stop=["a", ""])).param == "stop"
    override = submit(messages=user("x"), template_kwargs={"messages": []})
    assert refusal(encoder, override).param == "chat_template_kwargs.messages"
    plain = Encoder(Tokenizer(byte_level), Grammars(NO_FOLDER), 1)
    error = refusal(plain, submit(messages=user("x")))
    assert (error.code, error.param) == ("no_chat_template", "messages")
    assert refusal(plain, submit(prompt="")).param == "prompt"
    plain.close()


def test_an_empty_prompt_is_the_bos_token(encoder: Encoder, byte_level: Library) -> None:
    assert encode(encoder, submit(prompt="")).ids.tolist() == [byte_level.token_to_id("<|im_start|>")]


def test_template_options_reach_the_template(encoder: Encoder, byte_level: Library) -> None:
    silent = submit(messages=user("x"), template_kwargs={"add_generation_prompt": False})
    assert encode(encoder, silent).ids.tolist() == byte_level.encode("<|im_start|>user\nx<|im_end|>\n").ids


def test_the_pool_is_bounded(encoder: Encoder, chatty: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    gate, encode_now = threading.Event(), Tokenizer.encode

    def slowly(self: Tokenizer, text: str, special: bool) -> Any:
        assert gate.wait(10)
        return encode_now(self, text, special)

    monkeypatch.setattr(Tokenizer, "encode", slowly)

    async def main() -> list[Any]:
        tasks = [asyncio.create_task(encoder.prompt(submit(prompt="abc"), LIMITS)) for _ in range(4)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert [type(result) for result in results] == [Prompt] * 3 + [RequestError]
    assert (results[3].status, results[3].code) == (503, "overloaded")


def test_tokenize_and_detokenize(encoder: Encoder, byte_level: Library) -> None:
    def tokenize(**args: Any) -> dict[str, Any]:
        return asyncio.run(encoder.tokenize(args, LIMITS))

    encoded = byte_level.encode("Hello 안녕")
    assert tokenize(prompt="Hello 안녕") == {
        "count": len(encoded),
        "max_model_len": 2048,
        "tokens": encoded.ids,
        "token_strs": None,
    }
    assert tokenize(prompt="Hello 안녕", return_token_strs=True)["token_strs"] == encoded.tokens
    chat = byte_level.encode("<|im_start|>user\nx<|im_end|>\n").ids
    assert tokenize(messages=user("x"), add_generation_prompt=False)["tokens"] == chat
    assert asyncio.run(encoder.detokenize({"tokens": encoded.ids}, LIMITS)) == {"prompt": "Hello 안녕"}
    for args, param in (
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
    ):
        with pytest.raises(RequestError) as caught:
            tokenize(**args)
        assert caught.value.param == param
    for tokens in (None, ["a"], [True], [401], [2**70]):
        with pytest.raises(RequestError) as caught:
            asyncio.run(encoder.detokenize({"tokens": tokens}, LIMITS))
        assert caught.value.param == "tokens"


def test_encoding_lets_the_loop_run(byte_level: Library) -> None:
    """3 MB in the pool: the loop turns many times meanwhile, since the encoder lets go of the interpreter's lock."""
    encoder = Encoder(Tokenizer(byte_level), Grammars(NO_FOLDER), 1)
    roomy = Welcome(1, 0, 16, 100, 10_000_000, 401, [1], "digest")

    async def main() -> int:
        task = asyncio.create_task(encoder.prompt(submit(prompt="hello world this is " * 150_000), roomy))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.002)
            turns += 1
        await task
        return turns

    assert asyncio.run(main()) > 20
    encoder.close()


def test_demands_that_cannot_be_met(chatty: Tokenizer, encoder: Encoder, byte_level: Library) -> None:
    tools = ToolUse([{"type": "function", "function": {"name": "f"}}], "required")
    wished = submit(messages=user("x"), tools=tools, grammar=GrammarSpec("regex", "a", "response_format"))
    assert refusal(encoder, wished).param == "response_format"
    beams = submit(messages=user("x"), tools=tools)
    beams = replace(beams, sampling=replace(beams.sampling, use_beam_search=True))
    assert "beam search" in refusal(encoder, beams).message
    unknown = Tokenizer(byte_level, template=chatty.template_for(None))
    other = Encoder(unknown, Grammars(NO_FOLDER), 1)
    assert "--tool-call-parser" in refusal(other, submit(messages=user("x"), tools=tools)).message
    other.close()


def test_a_grammar_begins_behind_reasoning(
    chatty: Tokenizer, byte_level: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the answer may begin as reasoning; a completion has none."""
    compiled: list[GrammarSpec] = []

    async def compile(self: Grammars, spec: GrammarSpec, limits: Welcome) -> str:
        compiled.append(spec)
        return "compiled"

    monkeypatch.setattr(Grammars, "compile", compile)
    wish = GrammarSpec("json", "{}", "response_format")
    template = chatty.template_for(None)
    for reasoning in ("", "think", "deepseek_r1"):
        tokenizer = Tokenizer(byte_level, template=template, format=OutputFormat("hermes", reasoning))
        encoder = Encoder(tokenizer, Grammars(NO_FOLDER), 1)
        for tools in (None, ToolUse([{"type": "function", "function": {"name": "f"}}])):
            assert encode(encoder, submit(messages=user("x"), grammar=wish, tools=tools)).grammar == "compiled"
        encode(encoder, submit(prompt="x", grammar=wish))
        encoder.close()
    # What is wrong with a wish is told of it alone, so it is checked before.
    kinds = ["json"] * 3 + ["json", "behind", "json", "behind", "json"] * 2
    assert [spec.kind for spec in compiled] == kinds
    assert {spec.param for spec in compiled} == {"response_format"}
    free, begun = (json.loads(compiled[place].text)[0].splitlines()[0] for place in (4, 9))
    assert free.endswith("reasoning)? @answer") and begun.endswith(" reasoning @answer")
