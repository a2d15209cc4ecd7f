"""Requests with grammars through the scheduler's own process and two ranks of null workers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from shared.codec import int32
from shared.ids import COUNTER_BITS
from shared.models import locate
from shared.sampling import SamplingParams
from shared.wire import Accept, Cancel, Reject, SubmitTokens
from tests.services.scheduler.process import Client, running

RID = 1 << COUNTER_BITS
EOS = 2


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with running(tmp_path_factory.mktemp("grammars"), ranks=2) as (_, client):
        yield client


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    return Tokenizer.from_file(str(locate("").folder / "tokenizer.json"))


def submit(client: Client, rid: int, grammar: str, max_tokens: int = 60, seed: int = 0) -> None:
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens)
    client.send(SubmitTokens(rid, f"req-{rid}", params, int32([5, 6, 7]), grammar=grammar))


def test_every_rank_gets_every_mask(client: Client, library: Tokenizer) -> None:
    """Each samples by itself, and their checksums are compared in every step; plain requests run beside."""
    grammar = 'start: "id: " /[0-9a-f]{4,9}/ "; name: " /[A-Z][a-z]{1,5}/ "."'
    for index in range(24):
        submit(client, RID + index, grammar, seed=index)
        client.submit(RID + 100 + index, [9, index + 5], 30)
    client.wait_for(lambda: len(client.done) == 48)
    texts = set()
    for index in range(24):
        text = library.decode([id for id in client.outputs[RID + index, 0] if id != EOS])
        assert re.fullmatch(r"id: [0-9a-f]{4,9}; name: [A-Z][a-z]{1,5}\.", text), text
        assert client.finished[RID + index, 0].reason == "stop"
        assert client.finished[RID + 100 + index, 0].reason == "length"
        texts.add(text)
    assert len(texts) > 12


def test_a_grammar_that_cannot_be_built_is_rejected(client: Client) -> None:
    submit(client, RID + 500, "start: nothing_of_that_name")
    reject = client.wait_for(lambda: client.last(Reject))
    assert (reject.rid, reject.status, reject.code) == (RID + 500, 400, "grammar_failed")
    assert "nothing_of_that_name" in reject.message


def test_a_cancel_that_overtakes_the_building_wins(client: Client) -> None:
    submit(
        client, RID + 600, '{"grammars": [{"json_schema": {"type": "integer", "multipleOf": 99991}}]}'
    )  # half a second
    client.send(Cancel(RID + 600))
    submit(client, RID + 601, 'start: "then" /[a-z]{3}/')  # built after it
    client.wait_for(lambda: RID + 601 in client.done)
    accepted = [message.rid for message in client.messages if isinstance(message, Accept)]
    assert RID + 601 in accepted
    assert RID + 600 not in accepted


def test_a_request_that_is_submitted_twice_meanwhile_runs_once(client: Client) -> None:
    for _ in range(3):
        submit(client, RID + 700, 'start: "once" /[a-z]{3}/', max_tokens=20)
    client.wait_for(lambda: RID + 700 in client.done)
    status = client.query("status").body
    assert not status["requests"]
    assert len(client.outputs[RID + 700, 0]) == client.finished[RID + 700, 0].tokens
