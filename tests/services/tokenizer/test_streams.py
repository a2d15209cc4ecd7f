"""The request table between a gateway and a scheduler that lose messages, cancel and go away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from services.tokenizer.detokenizer import Pieces
from services.tokenizer.encoder import Prompt
from services.tokenizer.parsers.hermes import Hermes
from services.tokenizer.parsers.output import OutputParser
from services.tokenizer.parsers.think import ThinkSplitter
from services.tokenizer.parsers.transducer import Piece, joined
from services.tokenizer.stop import StopStrings
from services.tokenizer.streams import Streams
from shared.codec import int32
from shared.errors import RequestError, WireError
from shared.metrics import Registry
from shared.sampling import SamplingParams
from shared.wire import (
    Accept,
    Ack,
    Cached,
    Cancel,
    Done,
    Finished,
    Message,
    Reject,
    Resume,
    Stop,
    SubmitText,
    SubmitTokens,
    Text,
    Tokens,
    Welcome,
)

LIMITS = Welcome(1, 0, 16, 100, 2048, 401, [1], "digest")
GATEWAY, OTHER = b"gateway:0:0123456789abcdef", b"gateway:1:0123456789abcdef"


class Gate:
    """An encoder that waits to be let through, so that a test decides what happens before."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.parser: Callable[[], OutputParser] | None = None

    async def prompt(self, message: SubmitText, limits: Welcome) -> Prompt:
        await self.open.wait()
        if message.prompt == "bad":
            raise RequestError("bad prompt", code="bad", param="prompt")
        stops = StopStrings(message.stop) if message.stop else None
        return Prompt(int32([5, 6, 7]), 100, stops, parser=self.parser)


class Table:
    """Streams with both wires recorded, and a clock that stands still until told."""

    def __init__(self, library: Library) -> None:
        self.now = 100.0
        self.up: list[Message] = []
        self.down: list[tuple[bytes, Message]] = []
        self.connected = True
        self.gate = Gate()
        self.streams = Streams(
            Pieces(library),
            self.gate,
            Registry(),
            process="tokenizer 0",
            to_scheduler=self._send_up,
            to_gateway=lambda raw, message: self.down.append((raw, message)),
            clock=lambda: self.now,
        )

    def _send_up(self, message: Message) -> bool:
        if self.connected:
            self.up.append(message)
        return self.connected

    def taken(self, kind: type[Any]) -> list[Any]:
        """Messages of ``kind`` to the gateways so far, forgotten afterwards."""
        found = [message for _, message in self.down if isinstance(message, kind)]
        self.down = [(raw, message) for raw, message in self.down if not isinstance(message, kind)]
        return found

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def accepted(self, rid: int = 1, **fields: Any) -> None:
        self.gate.open.set()
        self.streams.submit(GATEWAY, submit(rid, **fields), LIMITS)
        await self.settle()
        self.streams.accept(Accept(rid, 3))


def submit(rid: int = 1, n: int = 1, **fields: Any) -> SubmitText:
    fields = {"prompt": "abc", **fields}
    return SubmitText(rid, f"req-{rid}", "completions", SamplingParams(max_tokens=50, n=n), **fields)


def tokens(rid: int, offset: int, ids: list[int], *, seq: int = 0, end: str = "", done: bool | None = None) -> Tokens:
    total = offset + len(ids)
    over = [Done(rid, 3, 0, total)] if (bool(end) if done is None else done) else []
    finished = [Finished(rid, seq, total, end)] if end else []
    return Tokens(1, [rid], [seq], [offset], [len(ids)], int32(ids), finished, over)


@pytest.fixture
def table(byte_level: Library) -> Table:
    return Table(byte_level)


def test_a_cancel_while_encoding(table: Table) -> None:
    async def main() -> None:
        table.streams.submit(GATEWAY, submit(), LIMITS)
        await table.settle()
        table.streams.cancel(1)
        table.streams.cancel(1)
        table.gate.open.set()
        await table.settle()
        assert table.up == [] and table.down == []
        assert table.streams.open_requests == 0
        table.streams.submit(GATEWAY, submit(), LIMITS)
        await table.settle()
        assert table.up == []
        table.now += 11
        table.streams.tick()
        table.streams.submit(GATEWAY, submit(), LIMITS)
        await table.settle()
        assert [type(message) for message in table.up] == [SubmitTokens]

    asyncio.run(main())


def test_a_refused_prompt_and_a_full_queue(table: Table) -> None:
    async def main() -> None:
        table.gate.open.set()
        table.streams.submit(GATEWAY, submit(1, prompt="bad"), LIMITS)
        await table.settle()
        assert table.down == [(GATEWAY, Reject(1, 400, "bad", "prompt", "bad prompt"))]
        table.connected = False
        table.streams.submit(GATEWAY, submit(2), LIMITS)
        await table.settle()
        rejected = table.down[-1][1]
        assert isinstance(rejected, Reject) and (rejected.rid, rejected.status) == (2, 503)
        assert table.streams.open_requests == 0

    asyncio.run(main())


def test_one_text_per_gateway_and_step(table: Table, byte_level: Library) -> None:
    async def main() -> None:
        await table.accepted(1)
        await table.accepted(2)
        table.streams.submit(OTHER, submit(3), LIMITS)
        await table.settle()
        table.streams.accept(Accept(3, 3))
        table.down.clear()
        a, b, c = (byte_level.token_to_id(letter) for letter in "abc")
        table.streams.tokens(Tokens(1, [1, 2, 3], [0, 0, 0], [0, 0, 0], [1, 0, 2], int32([a, b, c])))
        table.streams.tokens(Tokens(2, [2, 9], [0, 0], [0, 0], [1, 1], int32([b, c])))
        sent = [(raw, message.rids, message.texts) for raw, message in table.down if isinstance(message, Text)]
        assert sent == [(GATEWAY, [1], ["a"]), (OTHER, [3], ["bc"]), (GATEWAY, [2], ["b"])]

    asyncio.run(main())


def test_ends_wait_for_what_was_lost(table: Table, byte_level: Library) -> None:
    """FINISHED and DONE arrive, the tokens before them do not: they are asked for, once, and then it ends."""

    async def main() -> None:
        await table.accepted()
        ids = byte_level.encode("abcd").ids
        table.up.clear()
        lost = Tokens(1, [], [], [], [], int32([]), [Finished(1, 0, len(ids), "length")], [Done(1, 3, 0, len(ids))])
        table.streams.tokens(lost)
        table.streams.tokens(lost)
        assert table.up == [Resume(1, 0, 0)] and table.taken(Text) == []
        table.streams.tokens(tokens(1, 0, ids, end="length"))
        text = table.taken(Text)
        assert [message.texts for message in text] == [["abcd"]]
        assert text[0].finished[0].reason == "length" and text[0].done[0].completion_tokens == len(ids)
        table.streams.tokens(tokens(1, 0, ids, end="length"))
        assert table.taken(Text) == []

    asyncio.run(main())


def test_what_of_a_prompt_was_cached_is_told_with_its_first_text_and_again(table: Table, byte_level: Library) -> None:
    async def main() -> None:
        await table.accepted()
        a = byte_level.token_to_id("a")
        for _ in range(2):  # the second time it is known
            table.streams.tokens(Tokens(1, [1], [0], [0], [1], int32([a]), cached=[Cached(1, 2), Cached(9, 4)]))
        (text,) = table.taken(Text)
        assert text.cached == [Cached(1, 2)] and text.texts == ["a"]
        table.streams.tokens(tokens(1, 1, [a]))
        (text,) = table.taken(Text)
        assert text.cached == []
        table.streams.resume(GATEWAY, Resume(1, 0, 0))
        (text,) = table.taken(Text)
        assert text.cached == [Cached(1, 2)] and text.texts == ["aa"]

    asyncio.run(main())


def test_a_stop_wins_over_a_crossing_length(table: Table, byte_level: Library) -> None:
    async def main() -> None:
        await table.accepted(stop=["c"])
        ids = [byte_level.token_to_id(letter) for letter in "abcde"]
        table.up.clear()
        table.streams.tokens(tokens(1, 0, ids, end="length"))
        assert table.up == [Stop(1, 0, 3)]
        (text,) = table.taken(Text)
        assert text.texts == ["ab"] and text.token_counts == [3]
        assert text.finished == [Finished(1, 0, 3, "stop", "c")]
        assert text.done == [Done(1, 3, 0, 3)]  # what came after the stop is nothing that was asked for
        table.streams.tokens(Tokens(2, [], [], [], [], int32([]), [Finished(1, 0, 3, "stop")], [Done(1, 3, 0, 3)]))
        assert all(message.finished == [] for message in table.taken(Text))

    asyncio.run(main())


@pytest.mark.parametrize(("include", "wanted"), [(False, "ab"), (True, "abc")])
def test_the_text_of_a_stop_token(table: Table, byte_level: Library, include: bool, wanted: str) -> None:
    async def main() -> None:
        ids = [byte_level.token_to_id(letter) for letter in "abc"]
        sampling = SamplingParams(max_tokens=50, stop_token_ids=[ids[-1]])
        table.gate.open.set()
        table.streams.submit(GATEWAY, replace(submit(include_stop_str_in_output=include), sampling=sampling), LIMITS)
        await table.settle()
        table.streams.accept(Accept(1, 3))
        table.streams.tokens(tokens(1, 0, ids, end="stop"))
        (text,) = table.taken(Text)
        assert "".join(text.texts) == wanted and text.token_counts == [3]

    asyncio.run(main())


def test_the_end_is_told_until_acknowledged(table: Table) -> None:
    async def main() -> None:
        await table.accepted()
        table.streams.tokens(tokens(1, 0, [50], end="length"))
        table.taken(Text)
        table.up.clear()
        table.now += 3
        table.streams.tick()
        (again,) = table.taken(Text)
        assert again.rids == [] and again.finished[0].tokens == 1 and again.done[0].rid == 1
        table.streams.acknowledge([1, 77])
        assert table.up == [Ack([1])]
        table.now += 3
        table.streams.tick()
        assert table.taken(Text) == []
        table.streams.tokens(tokens(1, 0, [50], end="length"))
        assert table.up == [Ack([1]), Ack([1])]

    asyncio.run(main())


def test_a_lost_gateway(table: Table) -> None:
    async def main() -> None:
        await table.accepted()
        table.up.clear()
        table.streams.lose_gateway(GATEWAY)
        assert [(type(m), m.rid) for m in table.up if isinstance(m, Cancel)] == [(Cancel, 1)]
        table.down.clear()
        table.streams.tokens(tokens(1, 0, [50], end="abort"))
        assert table.down == [] and table.up[-1] == Ack([1])
        assert table.streams.open_requests == 0

    asyncio.run(main())


def test_a_quiet_request_is_asked_about(table: Table) -> None:
    """Its very last message may be the lost one, which no gap can show."""

    async def main() -> None:
        await table.accepted()
        table.streams.tokens(tokens(1, 0, [50, 51]))
        table.up.clear()
        table.now += 6
        table.streams.tick()
        table.streams.tick()
        assert table.up == [Resume(1, 0, 2)]

    asyncio.run(main())


def test_a_submit_that_was_lost_is_sent_again(table: Table) -> None:
    async def main() -> None:
        table.gate.open.set()
        table.streams.submit(GATEWAY, submit(), LIMITS)
        await table.settle()
        table.streams.welcomed_again()
        table.now += 6
        table.streams.tick()
        sent = [message for message in table.up if isinstance(message, SubmitTokens)]
        assert len(sent) == 3 and sent[0] is sent[1] is sent[2]
        table.streams.accept(Accept(1, 3))
        table.streams.accept(Accept(1, 3))
        table.up.clear()
        table.streams.welcomed_again()
        assert table.up == [Resume(1, 0, 0)]
        assert len(table.taken(Accept)) == 1

    asyncio.run(main())


def test_a_failed_scheduler_ends_everything(table: Table) -> None:
    async def main() -> None:
        await table.accepted(1, n=2)
        table.streams.tokens(tokens(1, 0, [50], seq=1, end="length", done=False))
        table.taken(Text)
        table.streams.submit(GATEWAY, submit(2), LIMITS)
        await table.settle()
        table.streams.fail_all("the scheduler is gone")
        (text,) = table.taken(Text)
        assert [(f.seq, f.reason, f.message) for f in text.finished] == [(0, "error", "the scheduler is gone")]
        assert [d.rid for d in text.done] == [1]
        (rejected,) = table.taken(Reject)
        assert (rejected.rid, rejected.status, rejected.message) == (2, 503, "the scheduler is gone")
        assert table.streams.open_requests == 0

    asyncio.run(main())


def test_a_second_submit_attaches_again(table: Table, byte_level: Library) -> None:
    async def main() -> None:
        await table.accepted()
        ids = [byte_level.token_to_id(letter) for letter in "abcd"]
        table.streams.tokens(tokens(1, 0, ids))
        table.up.clear()
        table.down.clear()
        table.streams.submit(OTHER, submit(generated=int32(ids[:3]), generated_counts=[3]), LIMITS)
        await table.settle()
        assert table.up == []
        text = next(message for raw, message in table.down if raw == OTHER and isinstance(message, Text))
        assert (text.offsets, text.texts) == ([3], ["d"])
        table.streams.tokens(tokens(1, 4, ids[:1]))
        assert table.down[-1][0] == OTHER

    asyncio.run(main())


def test_a_request_that_was_under_way_elsewhere(table: Table, byte_level: Library) -> None:
    async def main() -> None:
        ids = [byte_level.token_to_id(letter) for letter in "abcd"]
        await table.accepted(generated=int32(ids[:2]), generated_counts=[2])
        sent = table.up[0]
        assert isinstance(sent, SubmitTokens) and sent.generated.tolist() == ids[:2]
        table.streams.tokens(tokens(1, 2, ids[2:], end="length"))
        (text,) = table.taken(Text)
        assert (text.offsets, text.texts, text.token_counts) == ([2], ["cd"], [4])

    asyncio.run(main())


def test_a_stop_string_in_what_was_generated_elsewhere(table: Table, byte_level: Library) -> None:
    async def main() -> None:
        ids = [byte_level.token_to_id(letter) for letter in "abcd"]
        await table.accepted(generated=int32(ids), generated_counts=[4], stop=["c"])
        assert table.up[-1] == Stop(1, 0, 3)
        (text,) = table.taken(Text)
        assert text.finished == [Finished(1, 0, 3, "stop", "c")]

    asyncio.run(main())


def test_tokens_without_their_accept(table: Table) -> None:
    """The ACCEPT was lost; the gateway must still get one before the text, or it would never send headers."""

    async def main() -> None:
        table.gate.open.set()
        table.streams.submit(GATEWAY, submit(), LIMITS)
        await table.settle()
        table.streams.tokens(tokens(1, 0, [50], end="length"))
        assert [type(message) for _, message in table.down] == [Accept, Text]

    asyncio.run(main())


def test_columns_that_do_not_fit(table: Table) -> None:
    for bad in (
        Tokens(1, [1], [0], [0], [2], int32([5])),
        Tokens(1, [1, 2], [0], [0], [1], int32([5])),
        Tokens(1, [1, 1], [0, 0], [0, 0], [2, -1], int32([5])),
    ):
        with pytest.raises(WireError):
            table.streams.tokens(bad)


class Receiver:
    """A gateway's side of one sequence, by the protocol: drops overlap, asks for gaps."""

    def __init__(self) -> None:
        self.text, self.ids, self.done = "", list[int](), False
        self.pieces: list[Piece] = []
        self.finished: Finished | None = None

    def take(self, message: Text) -> int | None:
        """The offset to RESUME from, if something is missing."""
        at = 0
        columns = (message.offsets, message.channels, message.texts, message.token_counts, message.id_counts)
        for offset, channel, text, count, id_count in zip(*columns, strict=True):
            ids, at = message.ids[at : at + id_count].tolist(), at + id_count
            if offset > len(self.text) or count - id_count > len(self.ids):
                return len(self.text)
            self.pieces.append((channel, text[len(self.text) - offset :]))
            self.text += text[len(self.text) - offset :]
            self.ids += ids[len(self.ids) - (count - id_count) :]
        for finished in message.finished:
            if finished.tokens > len(self.ids):
                return len(self.text)
            self.finished = finished
        if message.done and self.finished is None:
            return len(self.text)
        self.done = bool(message.done)
        return None


def parser() -> OutputParser:
    return OutputParser([ThinkSplitter(False), Hermes(["f"], True)])


CALLS = '<think>Hm.</think>So:<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call><tool_call>{"name": "g"}'


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_or_repeated_on_lossy_wires(table: Table, byte_level: Library, seed: int) -> None:
    """A third of all messages on both wires vanish; text and ids still arrive whole, exactly once."""
    rng = random.Random(seed)
    ids = [rng.randrange(2, 400) for _ in range(rng.randrange(1, 40))]
    receiver = through_lossy_wires(table, rng, ids)
    assert receiver.text == byte_level.decode(ids)
    assert receiver.ids == ids


@pytest.mark.parametrize("seed", range(20))
def test_no_call_is_lost_or_repeated_on_lossy_wires(table: Table, byte_level: Library, seed: int) -> None:
    table.gate.parser = parser
    ids = byte_level.encode(CALLS).ids
    receiver = through_lossy_wires(table, random.Random(seed), ids)
    whole = parser()
    assert joined(receiver.pieces) == joined(whole.feed(CALLS) + whole.finish())
    assert receiver.ids == ids


def through_lossy_wires(table: Table, rng: random.Random, ids: list[int]) -> Receiver:
    async def main() -> Receiver:
        await table.accepted(return_token_ids=True)
        receiver, sent = Receiver(), 0
        for _ in range(2000):
            table.now += 0.5
            if sent < len(ids):
                count = rng.randrange(1, 4)
                step = ids[sent : sent + count]
                message = tokens(1, sent, step, end="length" if sent + len(step) == len(ids) else "")
                sent += len(step)
                if rng.random() < 0.67:
                    table.streams.tokens(message)
            asked = [message for message in table.up if isinstance(message, Resume)]
            table.up.clear()
            for resume in asked:
                if rng.random() < 0.67:
                    end = "length" if sent == len(ids) else ""
                    table.streams.tokens(tokens(1, resume.offset, ids[resume.offset : sent], end=end))
            for text in table.taken(Text):
                if rng.random() < 0.67:
                    missing = receiver.take(text)
                    if missing is not None:
                        table.streams.resume(GATEWAY, Resume(1, 0, missing))
            table.streams.tick()
            if receiver.done:
                return receiver
        raise AssertionError(f"not over: {receiver.text!r}")

    return asyncio.run(main())
