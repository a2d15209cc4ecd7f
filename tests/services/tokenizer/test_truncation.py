"""Prompts that are too long, where they shall be cut: what is kept is what transformers keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from services.tokenizer.encoder import Encoder, Prompt
from services.tokenizer.grammars import Grammars
from services.tokenizer.shorten import without_oldest
from services.tokenizer.tokenizer import Tokenizer
from shared.codec import int32
from shared.errors import RequestError
from shared.sampling import SamplingParams
from shared.wire import SubmitText, Truncation, Welcome
from tests.services.tokenizer import toy

NO_FOLDER = Path("none")  # no grammar is compiled here
LIMITS = Welcome(1, 0, 16, 100, 64, 401, [1], "digest")
TEXT = "The capital of Korea is 서울, and keys 😀 and values are held in blocks. "


def submit(max_tokens: int | None = 8, **fields: Any) -> SubmitText:
    endpoint = "chat" if "messages" in fields else "completions"
    return SubmitText(
        rid=1, request_id="r", endpoint=endpoint, sampling=SamplingParams(max_tokens=max_tokens), **fields
    )


def encode(encoder: Encoder, message: SubmitText, limits: Welcome = LIMITS) -> Prompt:
    return asyncio.run(encoder.prompt(message, limits))


@pytest.fixture
def encoder(chatty: Tokenizer) -> Iterator[Encoder]:
    encoder = Encoder(chatty, Grammars(NO_FOLDER), 1)
    yield encoder
    encoder.close()


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory, byte_fallback: Library) -> Path:
    return toy.save(tmp_path_factory.mktemp("bos"), byte_fallback, bos_token="<s>")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("special", [True, False])
def test_tokens_are_cut_as_transformers_cuts_them(with_bos: Path, side: str, special: bool) -> None:
    """The BOS is kept, wherever the rest is cut."""
    oracle: Any = transformers.AutoTokenizer.from_pretrained(with_bos, truncation_side=side)
    encoder = Encoder(Tokenizer.load(with_bos), Grammars(NO_FOLDER), 1)
    whole = len(oracle(TEXT, add_special_tokens=special)["input_ids"])
    roomy = Welcome(1, 0, 16, 100, 1000, 400, [2], "digest")
    for keep in (2, 7, whole - 1, whole, whole + 1):
        expected = oracle(TEXT, add_special_tokens=special, truncation=True, max_length=keep)["input_ids"]
        message = submit(prompt=TEXT, add_special_tokens=special, truncation=Truncation(keep, side))
        assert encode(encoder, message, roomy).ids.tolist() == expected
    encoder.close()


def test_ids_and_chats_are_cut_too(encoder: Encoder, byte_level: Library) -> None:
    ids = list(range(2, 90))
    kept = encode(encoder, submit(prompt_ids=int32(ids), truncation=Truncation(5, "left")))
    assert kept.ids.tolist() == ids[-5:]
    kept = encode(encoder, submit(prompt_ids=int32(ids), truncation=Truncation(5, "right")))
    assert kept.ids.tolist() == ids[:5]
    messages = [{"role": "user", "content": TEXT * 4}]
    rendered = byte_level.encode(f"<|im_start|>user\n{TEXT * 4}<|im_end|>\n<|im_start|>assistant\n").ids
    chat = encode(encoder, submit(messages=messages, truncation=Truncation(20, "left")))
    assert chat.ids.tolist() == rendered[-20:]


def test_without_a_number_as_many_are_kept_as_leave_room(encoder: Encoder) -> None:
    ids = [7] * 500
    for wanted, kept in ((8, 56), (None, 63), (63, 1)):
        prompt = encode(encoder, submit(wanted, prompt_ids=int32(ids), truncation=Truncation()))
        assert (len(prompt.ids), prompt.max_tokens) == (kept, wanted or 1)
    short = encode(encoder, submit(prompt_ids=int32(ids[:9]), truncation=Truncation()))
    assert len(short.ids) == 9
    for wanted, keep in ((64, 0), (8, 57)):  # no room is left for what is wanted
        with pytest.raises(RequestError) as caught:
            encode(encoder, submit(wanted, prompt_ids=int32(ids), truncation=Truncation(keep)))
        assert caught.value.code == "context_length_exceeded"


def test_a_text_far_longer_than_the_context_is_cut(encoder: Encoder, byte_level: Library) -> None:
    """Of five megabytes only the end is encoded; it has the same tokens as in the whole."""
    text = "word " * 1_000_000 + TEXT
    expected = byte_level.encode("word " * 1_000 + TEXT).ids[-40:]
    assert encode(encoder, submit(prompt=text, truncation=Truncation(40))).ids.tolist() == expected


def test_echo_has_what_was_kept(encoder: Encoder, byte_level: Library) -> None:
    prompt = encode(encoder, submit(prompt=TEXT, truncation=Truncation(6), echo=True))
    assert prompt.text == byte_level.decode(prompt.ids.tolist()) and TEXT.endswith(prompt.text)
    assert encode(encoder, submit(prompt=TEXT, truncation=Truncation(60), echo=True)).text == TEXT


# ---- conversations ----

SYSTEM = {"role": "system", "content": "s"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(text: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    return {"role": "assistant", "content": text, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("messages", "room", "kept"),
    [
        ([user("a"), said("b"), user("c")], 2, [user("c")]),
        ([SYSTEM, user("a"), said("b"), user("c"), said("d"), user("e")], 4, [SYSTEM, user("c"), said("d"), user("e")]),
        ([user("a"), SYSTEM, user("b")], 2, [SYSTEM, user("b")]),
        ([user("a"), called("b"), result("c"), said("d"), user("e")], 4, [user("e")]),
        # The last turn alone is too long: its oldest steps go, and no result without its call stays.
        ([user("a"), called("b"), result("c"), called("d"), result("e")], 3, [called("d"), result("e")]),
        ([SYSTEM, user("a"), called("b"), result("c"), said("d")], 2, [SYSTEM, said("d")]),
        # Nothing fits: the least that can be left, which is then refused.
        ([SYSTEM, user("a"), said("b"), user("c")], 1, [SYSTEM, user("c")]),
        ([SYSTEM, user("a")], 1, [SYSTEM, user("a")]),
        ([SYSTEM], 0, [SYSTEM]),
    ],
)
def test_the_oldest_turns_go(messages: list[Any], room: int, kept: list[Any]) -> None:
    assert without_oldest(messages, lambda some: len(some) <= room) == kept


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=30), st.integers(0, 30))
def test_of_any_conversation_a_tail_and_all_system_messages_stay(roles: list[str], room: int) -> None:
    messages = [{"role": role, "content": str(place)} for place, role in enumerate(roles)]
    asked: list[int] = []

    def fits(some: list[Any]) -> bool:
        asked.append(len(some))
        return len(some) <= room

    kept = without_oldest(messages, fits)
    others = [message for message in messages if message["role"] != "system"]
    kept_others = [message for message in kept if message["role"] != "system"]
    assert [one for one in messages if one["role"] == "system"] == [one for one in kept if one["role"] == "system"]
    assert not kept_others or others[-len(kept_others) :] == kept_others
    assert [int(one["content"]) for one in kept] == sorted(int(one["content"]) for one in kept)
    assert bool(kept_others) == bool(others) and len(asked) <= 6
    if kept != messages:
        assert kept_others[0]["role"] in ("user", "assistant")


def test_a_chats_oldest_turns_go_until_an_answer_has_room(encoder: Encoder) -> None:
    turns = [one for number in range(20) for one in (user(f"question {number}"), said(f"answer {number}"))]
    messages = [SYSTEM, *turns, user("last")]
    whole = encode(encoder, submit(messages=messages), Welcome(1, 0, 16, 100, 5000, 401, [1], "digest"))
    limits = Welcome(1, 0, 16, 100, 200, 401, [1], "digest")
    assert len(whole.ids) > 2 * limits.max_model_len
    with pytest.raises(RequestError) as caught:
        encode(encoder, submit(messages=messages), limits)
    assert caught.value.code == "context_length_exceeded"
    turn = len(encode(encoder, submit(messages=turns[:2], template_kwargs={"add_generation_prompt": False})).ids)
    for wanted, room in ((8, 8), (100, 100), (None, 25)):  # an eighth of the context
        message = submit(wanted, messages=messages, truncation=Truncation(side="messages"), echo=True)
        prompt = encode(encoder, message, limits)
        assert limits.max_model_len - room - turn - 4 <= len(prompt.ids) <= limits.max_model_len - room
        assert prompt.text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nquestion ")
        assert prompt.text.endswith("user\nlast<|im_end|>\n<|im_start|>assistant\n")
        assert prompt.max_tokens == (wanted or limits.max_model_len - len(prompt.ids))
    fitting = submit(None, messages=messages[-3:], truncation=Truncation(side="messages"), echo=True)
    assert "answer 19" in encode(encoder, fitting).text  # of 64 tokens, none of an eighth is needed
    with pytest.raises(RequestError) as caught:
        encode(encoder, submit(messages=[*turns, user(TEXT * 9)], truncation=Truncation(side="messages")), limits)
    assert caught.value.code == "context_length_exceeded"
