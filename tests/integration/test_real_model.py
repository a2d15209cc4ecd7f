"""The built-in model through the whole server, token for token against transformers.

The oracle shares nothing with us but the GGUF file: transformers reads it with its own loader and tokenizer converter.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shared import models
from tests.integration.prompts import PROMPTS
from tests.integration.server import Server, serve
from tests.services.worker.oracle import follow

MAX_TOKENS = 64


class Oracle:
    """transformers' model and tokenizer of the built-in GGUF, in fp32."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        gguf = models.locate("").gguf
        assert gguf is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            where: dict[str, Any] = {"gguf_file": gguf.name}
            self.model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    def generates(self, ids: list[int], output: list[int]) -> list[int]:
        """``output`` if it is the greedy continuation, else the first ids of it that are, and the one that is not."""
        best: list[int] = follow(self.model, ids, output).argmax(-1).tolist()
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(best, output, strict=True)))
        return best[: same + 1]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("real"), "--dtype", "float32", "--max-model-len", "4096") as server:
        yield server


def complete(server: Server, ids: list[int]) -> list[int]:
    body = {"model": server.model, "prompt": ids, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    with server.client(timeout=300) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["prompt_token_ids"] == ids
    return list(choice["token_ids"])


@pytest.fixture(scope="module")
def alone(server: Server, oracle: Oracle) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt ids, and the output ids that the server gave one prompt after the other, by prompt name."""
    encoded = {name: oracle.encode(messages) for name, messages in PROMPTS.items()}
    return {name: (ids, complete(server, ids)) for name, ids in encoded.items()}


def test_the_capital_of_france(server: Server) -> None:
    body = {"model": server.model, "messages": PROMPTS["capital"], "temperature": 0}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", "The capital of France is Paris.")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37
    assert answer["usage"]["completion_tokens"] == 8


def test_chats_encode_as_in_transformers(server: Server, oracle: Oracle) -> None:
    with server.client() as client:
        for name, messages in PROMPTS.items():
            answer = client.post("/tokenize", json={"messages": messages}).json()
            assert answer["tokens"] == oracle.encode(messages), name


def test_greedy_ids_alone(oracle: Oracle, alone: dict[str, tuple[list[int], list[int]]]) -> None:
    assert len(alone) > 20 and max(len(ids) for ids, _ in alone.values()) > 1500
    eos = oracle.model.config.eos_token_id
    for name, (ids, output) in alone.items():
        assert output == oracle.generates(ids, output), name
        assert (len(output) == MAX_TOKENS or output[-1] == eos) and eos not in output[:-1], name
    lengths = {len(output) for _, output in alone.values()}
    assert min(lengths) < MAX_TOKENS == max(lengths)  # both ends are seen


def test_greedy_ids_all_in_flight_at_once(server: Server, alone: dict[str, tuple[list[int], list[int]]]) -> None:
    """vLLM 17524, 23138: the same request among others, in another order of the batch, gave other tokens."""
    with ThreadPoolExecutor(len(alone)) as pool:
        answers = {name: pool.submit(complete, server, ids) for name, (ids, _) in alone.items()}
        for name, (_, wanted) in alone.items():
            assert answers[name].result() == wanted, name


def test_text_is_what_transformers_decodes(
    server: Server, oracle: Oracle, alone: dict[str, tuple[list[int], list[int]]]
) -> None:
    with server.client() as client:
        for name in ("korean", "emoji", "code"):
            body = {"model": server.model, "messages": PROMPTS[name], "temperature": 0, "max_tokens": MAX_TOKENS}
            text = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            assert text == oracle.tokenizer.decode(alone[name][1], skip_special_tokens=True), name
