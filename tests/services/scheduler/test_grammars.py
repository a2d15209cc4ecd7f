"""Grammars of new requests are built beside the loop, shared, and forgotten."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from services.scheduler import grammars
from services.scheduler.grammar import Grammar
from services.scheduler.grammars import Grammars, _Shelf
from shared.codec import int32
from shared.grammar import GrammarError
from shared.models import builtin
from shared.sampling import SamplingParams
from shared.wire import Memory, SubmitTokens
from tests.services.scheduler.toy_grammar import vocabulary

MEMORY = Memory(10, 0, 16, 256, 100, 49_152, [2], builtin.SHA256, builtin.NAME)


def request(rid: int, grammar: str) -> SubmitTokens:
    return SubmitTokens(rid, f"req-{rid}", SamplingParams(max_tokens=5), int32([1]), grammar=grammar)


class Built:
    """Waits for what a Grammars builds."""

    def __init__(self, model: str = "") -> None:
        self.woken = threading.Event()
        self.grammars = Grammars(model, "", self.woken.set)

    def ask(self, *requests: SubmitTokens, memory: Memory = MEMORY) -> list[Any]:
        for one in requests:
            self.grammars.ask(b"owner", one, memory)
        found: list[Any] = []
        deadline = time.monotonic() + 30
        while len(found) < len({one.rid for one in requests}):
            assert self.woken.wait(deadline - time.monotonic()), "no grammar was built"
            self.woken.clear()
            found += self.grammars.take()
        return found


def test_requests_come_back_in_order_with_their_grammars() -> None:
    built = Built()
    good, bad, again = built.ask(
        request(1, "start: /[ab]/"), request(2, "start: foo"), request(1, "start: /[ab]/"), request(3, 'start: "x"')
    )
    owner, message, grammar = good
    assert (owner, message.rid) == (b"owner", 1) and isinstance(grammar, Grammar) and not grammar.is_over
    assert isinstance(bad[2], GrammarError) and "foo" in str(bad[2])
    assert again[1].rid == 3 and again[2].is_over  # nothing but its one token may come
    built.grammars.close()


def test_another_models_vocabulary_is_refused() -> None:
    memory = Memory(10, 0, 16, 256, 100, 49_152, [2], "another", "other/model")
    built = Built()
    ((_, _, refused),) = built.ask(request(1, "start: /a/"), memory=memory)
    assert isinstance(refused, GrammarError)
    assert "other/model" in str(refused)
    built.grammars.close()


def test_a_model_that_cannot_be_found_is_an_error_of_that_request(tmp_path: Path) -> None:
    built = Built(str(tmp_path / "none"))
    ((_, _, refused),) = built.ask(request(1, "start: /a/"))
    assert isinstance(refused, GrammarError) and "none" in str(refused)
    built.grammars.close()


def test_matchers_are_shared_until_they_have_had_many_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "USES", 3)
    built = list[str]()
    new = grammars.new_matcher

    def counted(vocabulary: Any, grammar: str) -> Any:
        built.append(grammar)
        return new(vocabulary, grammar)

    monkeypatch.setattr(grammars, "new_matcher", counted)
    shelf = _Shelf(vocabulary())
    for _ in range(7):
        shelf.matcher("start: /[a-c]+/")
    assert len(built) == 3
    first, second = shelf.matcher("start: /[ab]/"), shelf.matcher("start: /[ab]/")
    assert first.consume_tokens(vocabulary().tokenize_str("a"))
    assert first.is_stopped() and not second.is_stopped()


def test_what_is_kept_is_bounded_by_number_and_by_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "REMEMBERED", 4)
    shelf = _Shelf(vocabulary())
    for number in range(1, 8):
        shelf.matcher(f"start: /a{{{number}}}/")
    assert list(shelf._kept) == [f"start: /a{{{number}}}/" for number in range(4, 8)]
    monkeypatch.setattr(grammars, "REMEMBERED_SECONDS", -1.0)  # less than any takes: only the newest stays
    shelf.matcher("start: /b/")
    assert list(shelf._kept) == ["start: /b/"]
    assert shelf._seconds == pytest.approx(sum(seconds for _, seconds, _ in shelf._kept.values()))
