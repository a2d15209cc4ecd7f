"""Golden bytes of every message, and what happens to bytes that are none.

The golden strings were read through once by hand against the msgpack specification (fixarray 0x90+n, fixstr 0xa0+n,
float64 0xcb, uint64 0xcf, nil 0xc0, false/true 0xc2/0xc3). If a change here is wanted, raise PROTOCOL_VERSION.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.codec import int32
from shared.errors import WireError
from shared.grammar import GrammarSpec
from shared.sampling import LogitRules, SamplingDefaults, SamplingParams
from tests.shared.golden import GOLDEN

RID = (3 << 48) | 7
RULES = LogitRules(0.5, 0.25, 2.0, 0.5, 3, [7], [-1.5], [8, 9], [[1], [2, 3]])
SAMPLING = SamplingParams(0.5, 0.25, 4, 0.125, 9, 16, 1, [2, 5], True, 3, True, 0.5, "never", 2, 0, RULES, [6, 7])
DEFAULTS = SamplingDefaults(0.5, 0.25, 20, 0.125, 2.0, 0.5, -0.5, 64)

MESSAGES: list[wire.Message] = [
    wire.Hello(
        1, "worker", 1, 77, "ipc:///a", 3, 42,
        wire.Memory(100, 0, 16, 4096, 2048, 300, [0, 2], "d1", "m1", "float32", DEFAULTS, "int8", "int4"),
    ),
    wire.Welcome(77, 3, 16, 100, 2048, 300, [0, 2], "d1", "m1", DEFAULTS),
    wire.HelloRequired(77),
    wire.Heartbeat(77, 12, 0.5, {"vllm:a": ["counter", "help", [], [[[], 1.0]]]}),
    wire.Goodbye("done"),
    wire.Fault("no such kind"),
    wire.Roster(2, ["tokenizer:0:0123456789abcdef"], ["ipc:///t"]),
    wire.SubmitText(
        RID, "req-1", "chat", SAMPLING, [{"role": "user", "content": "안녕"}], {"x": 1}, None, int32([]), True, True,
        ["\n"], False, True, 1, "salt", "tenant", 1.5, 2.5, int32([9, 8]), [2], ["no"], True,
        wire.ToolUse([{"type": "function"}], "function", "f", False), "{{ x }}",
        GrammarSpec("regex", "a+", "structured_outputs.regex"), wire.Truncation(5, "right"), True,
    ),
    wire.SubmitTokens(
        RID, "req-1", SAMPLING, int32([1, 2, 70000]), 1, "salt", "tenant", 1.5, 2.5, int32([9, 8]), [2], "start: /a+/"
    ),
    wire.Accept(RID, 3, int32([1, 2, 3]), "a b c"),
    wire.Reject(RID, 429, "queue_full", "", "too many", 1.5),
    wire.Cancel(RID, "client gone"),
    wire.Stop(RID, 0, 5),
    wire.Tokens(
        4, [RID], [0], [10], [2], int32([11, 12]), [wire.Finished(RID, 0, 12, "length")],
        [wire.Done(RID, 3, 0, 12, 0.5, 0.25, 2.0, 1)],
        wire.Logprobs([1], [-0.5], [1], [12], [-0.5], [1]),
        [wire.PromptLogprobs(RID, wire.Logprobs([1, 2], [-2.0, -0.5], [1, 0], [7], [-1.0], [3, 1]))],
        [wire.Cached(RID, 2)],
    ),
    wire.Text(
        [RID], [0], [40], [3], ["hé"], [12], [2], int32([11, 12]), [wire.Finished(RID, 0, 12, "stop", "\n", "", "", 5)],
        [wire.Done(RID, 3, 0, 12)],
        [wire.TextLogprobs(0, [wire.TokenLogprob(11, b"h", -0.5, 2, 40, [wire.Candidate(12, b"\xc3", -0.25)])])],
        [wire.PromptText(RID, [wire.TokenLogprob(7, b"a", None, 0, 0, [])])], [wire.Cached(RID, 2)],
    ),
    wire.Resume(RID, 0, 10),
    wire.Ack([RID]),
    wire.Query(1, "metrics", {"a": "b"}, 2),
    wire.Reply(1, 200, ["x"], 3),
    wire.Plan(
        4, 77, 88, False, 1,
        [
            wire.NewRow(
                2, 1, 0, 0.0, 1.0, 0, 0.0, 9, 2, wire.RowRules(2, [1, 2, 3], [0], RULES, 1, [4]), True,
                wire.Run(2, [3]), True,
            )
        ],
        [2], [0], [3], [[2]], [2], [1], [5], [6],
        [7],
        int32([1, 2, 3]), int32([33]), int32([1]), int32([34]), int32([1, 2]), int32([3, 4]), int32([5, 6]),
    ),
    wire.Result(
        4, 77, 88, 0, 123456, int32([1, 2]), int32([50, 60]), {"total": 0.5}, "",
        wire.Logprobs([1], [-0.5], [2], [60, 50], [-0.5, -1.5], [1]),
        wire.Logprobs([0, 0], [-0.5, -1.0], [0, 0], [], [], [4, 9]),
    ),
    wire.PlanRequired(77, 88, 3),
    wire.Mask(4, 77, 88, [2], int32([-1, 5])),
]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name))
        if isinstance(getattr(a, f.name), np.ndarray)
        else getattr(a, f.name) == getattr(b, f.name)
        for f in dataclasses.fields(a)
    )


def test_every_kind_has_an_example() -> None:
    assert sorted(message.kind for message in MESSAGES) == sorted(wire.Kind)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_golden_bytes(message: wire.Message) -> None:
    frames = wire.encode(message)
    assert " ".join(frame.hex() for frame in frames) == GOLDEN[type(message).__name__]
    assert same(wire.decode(frames), message)


def test_a_message_by_hand() -> None:
    frames = wire.encode(wire.Stop(rid=1, seq=0, keep=300))
    assert frames == [bytes([21, 1]), bytes([0x93, 1, 0, 0xCD, 0x01, 0x2C])]  # uint16 300
    ids = wire.encode(wire.Accept(rid=1, prompt_tokens=2, prompt_ids=int32([1, -1])))[2]
    assert ids == b"\x01\x00\x00\x00\xff\xff\xff\xff"


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([], "kind, version"),
        ([b"\x14"], "kind, version"),
        ([b"\x15\x02", b"\x93\x01\x00\x01"], "version 2"),
        ([b"\xf0\x01", b"\x90"], "unknown message kind 240"),
        ([b"\x15\x01"], "2 frames|1 frames"),
        ([b"\x15\x01", b"\x93\x01\x00"], "not msgpack"),
        ([b"\x15\x01", b"\x92\x01\x00"], "array of 3 fields"),
        ([b"\x15\x01", b"\x93\x01\x00\xa1a"], r"Stop.keep: wanted int, got str"),
        ([b"\x15\x01", b"\x93\x01\x00\xc3"], r"Stop.keep: wanted int, got bool"),
        ([b"\x12\x01", b"\x93\x01\x02\xa0", b"\x01\x02\x03"], "Accept.prompt_ids: 3 bytes"),
        ([b"\x19\x01", b"\x91\x92\x01\xa1x"], r"Ack.rids: wanted int, got str"),
    ],
)
def test_malformed_frames_name_what_is_wrong(frames: list[bytes], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        wire.decode(frames)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_random_frames_raise_nothing_but_wire_errors(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        wire.decode(frames)


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_raise_nothing_but_wire_errors(message: wire.Message, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in wire.encode(message)]
    frame = data.draw(st.sampled_from([f for f in frames if f]))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        wire.decode([bytes(frame) for frame in frames])
