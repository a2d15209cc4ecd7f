"""``quire tokenizer`` as a real process over ipc, between a scheduler and a gateway played by the test."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from tokenizers import Tokenizer as Library

from services.tokenizer.service import advertised
from shared.codec import int32
from shared.models import builtin, locate
from shared.sampling import SamplingParams
from shared.transport import ClusterKey, Endpoint, Security, connect_dealer
from shared.wire import (
    Accept,
    Ack,
    Cancel,
    Done,
    Fault,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    HelloRequired,
    Kind,
    Message,
    Query,
    Reject,
    Reply,
    Resume,
    Stop,
    SubmitText,
    SubmitTokens,
    Text,
    Tokens,
    Welcome,
    decode,
    encode,
)
from tests.services.tokenizer import toy
from tests.services.tokenizer.stand_ins import Gateway, Process, Scheduler

pytestmark = pytest.mark.timeout(60)

RID = 3 << 48 | 1


@pytest.fixture(scope="module")
def library() -> Library:
    return toy.byte_level()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Path:
    return toy.save(tmp_path_factory.mktemp("model"), library, bos_token="<|im_start|>")


class Stage:
    """A running tokenizer with both its neighbours, everybody welcomed."""

    def __init__(self, model: Path, folder: Path, lifeline_fd: int | None = None) -> None:
        self.folder = folder
        self.base = f"ipc://{folder}"
        self.scheduler = Scheduler(self.base, locate(str(model)))
        self.process = Process(model, self.base, folder / "log", lifeline_fd=lifeline_fd)
        self.hello = self.scheduler.receive(Hello, 30)
        self.scheduler.send(self.scheduler.welcome)
        self.gateway = Gateway(self.hello.address)
        self.welcome = self.gateway.receive(Welcome)

    def accept(self, submit: SubmitText) -> SubmitTokens:
        """Sends a request through to the scheduler, which accepts it."""
        self.gateway.send(submit)
        tokens = self.scheduler.receive(SubmitTokens)
        self.scheduler.send(Accept(submit.rid, len(tokens.prompt_ids)))
        assert self.gateway.receive(Accept).prompt_tokens == len(tokens.prompt_ids)
        return tokens

    def tokens(self, offset: int, ids: list[int], finished: str = "", rid: int = RID) -> None:
        total = offset + len(ids)
        ends = [Finished(rid, 0, total, finished)] if finished else []
        done = [Done(rid, 3, 0, total)] if finished else []
        self.scheduler.send(Tokens(1, [rid], [0], [offset], [len(ids)], int32(ids), ends, done))

    def close(self) -> None:
        try:
            self.process.end()
        finally:
            self.gateway.close()
            self.scheduler.close()


@pytest.fixture
def stage(model: Path, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(model, tmp_path)
    yield stage
    stage.close()


def prompt(text: str, rid: int = RID, **more: object) -> SubmitText:
    return SubmitText(
        rid=rid,
        request_id=f"req-{rid & 0xFFFF}",
        endpoint="completions",
        prompt=text,
        sampling=SamplingParams(max_tokens=20),
        **more,  # type: ignore[arg-type]
    )


def test_a_whole_request(stage: Stage, library: Library) -> None:
    assert stage.hello.role == "tokenizer"
    assert stage.hello.address.startswith(f"{stage.base}/t0-")
    assert (stage.welcome.max_model_len, stage.welcome.eos_ids, stage.welcome.client_number) == (64, [1], 3)
    submitted = stage.accept(prompt("The capital", return_token_ids=True, stop=["never"]))
    assert submitted.prompt_ids.tolist() == library.encode("The capital").ids
    answer = library.encode(" of Korea is Seoul 😀").ids
    stage.tokens(0, answer[:4])
    first = stage.gateway.receive(Text)
    stage.tokens(4, [*answer[4:], 1], "stop")
    last = stage.gateway.receive(Text)
    assert first.texts[0] + last.texts[0] == " of Korea is Seoul 😀"
    assert last.offsets == [len(first.texts[0])]
    assert [*first.ids.tolist(), *last.ids.tolist()] == [*answer, 1]
    assert last.token_counts == [len(answer) + 1]
    assert [(f.reason, f.tokens) for f in last.finished] == [("stop", len(answer) + 1)]
    assert [d.completion_tokens for d in last.done] == [len(answer) + 1]
    stage.gateway.send(Ack([RID]))
    assert stage.scheduler.receive(Ack).rids == [RID]


def test_a_stop_string_is_cut_out_and_the_scheduler_told(stage: Stage, library: Library) -> None:
    stage.accept(prompt("Paged", stop=[" values of"]))
    answer = library.encode(" memory holds keys and values of every token").ids
    keep = next(n for n in range(len(answer)) if " values of" in library.decode(answer[:n]))
    text, finished = "", []
    for place, id in enumerate(answer):
        stage.tokens(place, [id])
    stop = stage.scheduler.receive(Stop)
    assert (stop.rid, stop.seq, stop.keep) == (RID, 0, keep)
    while not finished:
        message = stage.gateway.receive(Text)
        text += "".join(message.texts)
        finished = message.finished
    assert text == " memory holds keys and"
    assert (finished[0].reason, finished[0].stop_reason, finished[0].tokens) == ("stop", " values of", keep)
    stage.scheduler.send(
        Tokens(9, [], [], [], [], int32([]), [Finished(RID, 0, keep, "length")], [Done(RID, 2, 0, keep)])
    )
    over = stage.gateway.receive(Text)
    assert over.finished == [] and [d.rid for d in over.done] == [RID]


def test_gaps_are_asked_for_and_overlap_dropped(stage: Stage, library: Library) -> None:
    stage.accept(prompt("x"))
    answer = library.encode("abcdefgh").ids
    stage.tokens(2, answer[2:4])
    assert stage.scheduler.receive(Resume).offset == 0
    stage.tokens(0, answer[:4])
    assert stage.gateway.receive(Text).texts == [library.decode(answer[:4])]
    stage.tokens(2, answer[2:], "length")
    tail = stage.gateway.receive(Text)
    assert tail.offsets == [len(library.decode(answer[:4]))] and tail.texts == [library.decode(answer[4:])]
    stage.gateway.send(Resume(RID, 0, 3))
    again = stage.gateway.receive(Text)
    assert again.offsets == [3] and again.texts == [library.decode(answer)[3:]]
    assert again.finished[0].reason == "length" and again.done[0].rid == RID


def test_what_the_tokenizer_refuses(stage: Stage) -> None:
    def refuse(submit: SubmitText) -> Reject:
        stage.gateway.send(submit)
        return stage.gateway.receive(Reject)

    long = refuse(prompt("abc " * 100))
    assert (long.status, long.code, long.param) == (400, "context_length_exceeded", "prompt")
    assert "maximum context length is 64 tokens" in long.message
    outside = refuse(SubmitText(2, "r", "completions", SamplingParams(max_tokens=1), prompt_ids=int32([5, 400])))
    assert (outside.status, outside.param) == (400, "prompt")
    assert "400" in outside.message
    chat = SubmitText(3, "r", "chat", SamplingParams(), messages=[{"role": "pirate", "content": "arr"}])
    raised = refuse(chat)
    assert (raised.status, raised.code) == (400, "chat_template_error") and "unknown role pirate" in raised.message
    assert stage.scheduler.seen == []


def test_a_cancel_before_its_submit_is_remembered(stage: Stage) -> None:
    stage.gateway.send(Cancel(RID))
    stage.gateway.send(Cancel(RID))
    stage.gateway.send(prompt("never", rid=RID))
    stage.gateway.send(prompt("but this", rid=RID + 1))
    assert stage.scheduler.receive(SubmitTokens).rid == RID + 1
    stage.gateway.send(Cancel(RID + 1, "client gone"))
    assert stage.scheduler.receive(Cancel).rid == RID + 1


def test_queries(stage: Stage, library: Library) -> None:
    stage.gateway.send(Query(1, "tokenize", {"prompt": "The capital", "return_token_strs": True}))
    reply = stage.gateway.receive(Reply)
    encoded = library.encode("The capital")
    assert (reply.number, reply.status) == (1, 200)
    assert reply.body == {
        "count": len(encoded),
        "max_model_len": 64,
        "tokens": encoded.ids,
        "token_strs": encoded.tokens,
    }
    stage.gateway.send(Query(2, "detokenize", {"tokens": encoded.ids}))
    assert stage.gateway.receive(Reply).body == {"prompt": "The capital"}
    stage.gateway.send(Query(3, "detokenize", {"tokens": "abc"}))
    reply = stage.gateway.receive(Reply)
    assert (reply.status, reply.body["param"]) == (400, "tokens")
    stage.gateway.send(Query(4, "weather"))
    assert stage.gateway.receive(Reply).status == 404


def test_strangers_and_garbage(stage: Stage, library: Library) -> None:
    stranger = Gateway(stage.hello.address, hello=False)
    stranger.send(Cancel(1))
    stranger.receive(HelloRequired)
    context = zmq.Context()
    nobody = connect_dealer(context, b"\x01odd", stage.hello.address, Security())
    nobody.send_multipart(encode(Hello(1, "gateway", 0, 5)))
    assert nobody.poll(5000) and isinstance(decode(nobody.recv_multipart()), Fault)
    rng = random.Random(7)
    for _ in range(300):
        frames = [bytes((rng.choice([*Kind]), 1)) if rng.random() < 0.8 else rng.randbytes(2)]
        frames += [rng.randbytes(rng.randrange(24)) for _ in range(rng.randrange(4))]
        stranger.socket.send_multipart(frames)
        stage.scheduler.socket.send_multipart([stage.scheduler.peer, *frames])
    stranger.receive(Fault)
    stage.scheduler.receive(Fault)
    stage.scheduler.send(Tokens(1, [RID], [0], [0], [5], int32([1])))
    stage.scheduler.send(Tokens(1, [RID, 2], [0], [0], [1], int32([1])))
    stage.accept(prompt("still here"))
    stage.tokens(0, library.encode("yes").ids, "length")
    assert stage.gateway.receive(Text).texts == ["yes"]
    deadline = time.monotonic() + 5
    counted = 0.0
    while counted < 300 and time.monotonic() < deadline:
        beat = stage.scheduler.receive(Heartbeat)
        if beat.metrics:
            counted = beat.metrics["quire:malformed_messages"][3][0][1]
    assert counted >= 300
    stranger.close()
    nobody.close(0)
    context.term()


def test_a_gateway_that_leaves_has_its_requests_cancelled(stage: Stage) -> None:
    stage.accept(prompt("x"))
    stage.gateway.send(Goodbye())
    assert stage.scheduler.receive(Cancel).rid == RID


def test_a_silent_scheduler_ends_open_streams(stage: Stage) -> None:
    """The gateway beats on, the scheduler says nothing more: the stream must not hang."""
    stage.accept(prompt("x"))
    deadline = time.monotonic() + 10
    ended = None
    while ended is None and time.monotonic() < deadline:
        stage.gateway.send(Heartbeat(5, 0, 0.0))
        try:
            ended = stage.gateway.receive(Text, 0.5)
        except AssertionError:
            continue
    assert ended is not None
    assert ended.finished[0].reason == "error" and "scheduler has been silent" in ended.finished[0].message
    assert ended.done[0].rid == RID
    stage.gateway.send(prompt("y", rid=RID + 1))
    assert stage.gateway.receive(Reject).status == 503
    stage.scheduler.send(stage.scheduler.welcome)
    stage.gateway.receive(Welcome)
    stage.accept(prompt("z", rid=RID + 2))


def test_a_scheduler_that_leaves_ends_open_streams_at_once(stage: Stage) -> None:
    stage.accept(prompt("x"))
    stage.scheduler.send(Goodbye("worker rank 0 has been silent"))
    ended = stage.gateway.receive(Text)
    assert ended.finished[0].message == "the scheduler has left: worker rank 0 has been silent"


def test_sigterm_waits_for_open_requests(stage: Stage) -> None:
    stage.accept(prompt("x"))
    stage.process.signal(signal.SIGTERM)
    stage.process.wait_for_log("draining 1 open requests")
    stage.gateway.send(prompt("late", rid=RID + 1))
    assert stage.gateway.receive(Reject).status == 503
    assert stage.process.running
    stage.tokens(0, [50, 51], "length")
    assert stage.gateway.receive(Text).done[0].rid == RID
    assert stage.scheduler.receive(Goodbye)
    assert stage.process.wait() == 0
    assert not list(stage.folder.glob("t0-*"))


def test_sigint_ends_open_streams_with_an_error(stage: Stage) -> None:
    stage.accept(prompt("x"))
    stage.process.signal(signal.SIGINT)
    assert stage.process.wait() == 0
    ended = stage.gateway.receive(Text)
    assert (ended.finished[0].reason, ended.finished[0].message) == ("error", "the server is shutting down")
    assert stage.scheduler.receive(Goodbye)
    assert not list(stage.folder.glob("t0-*"))


def test_a_launcher_gives_its_reason_to_open_streams(model: Path, tmp_path: Path) -> None:
    read, write = (end.detach() for end in socket.socketpair())
    stage = Stage(model, tmp_path, lifeline_fd=read)
    os.close(read)
    try:
        stage.accept(prompt("x"))
        os.write(write, b"worker 0 was killed\n")
        ended = stage.gateway.receive(Text)
        assert (ended.finished[0].reason, ended.finished[0].message) == ("error", "worker 0 was killed")
        assert stage.process.wait() == 1
    finally:
        os.close(write)
        stage.close()


def test_a_dead_launcher_leaves_no_tokenizer(model: Path, tmp_path: Path) -> None:
    read, write = (end.detach() for end in socket.socketpair())
    stage = Stage(model, tmp_path, lifeline_fd=read)
    os.close(read)
    os.close(write)
    try:
        assert stage.process.wait() == 1
    finally:
        stage.close()


def test_a_five_megabyte_prompt_leaves_other_streams_alone(stage: Stage, library: Library) -> None:
    """Hundreds of tokens of another stream go through between its arrival and its refusal or after it, none is lost."""
    stage.accept(prompt("x"))
    stage.gateway.send(prompt("word " * 1_000_000, rid=RID + 1))
    ids = library.encode("the capital of Korea").ids * 20
    for place, id in enumerate(ids):
        stage.tokens(place, [id])
    text, rejected = "", None
    while len(text) < len(library.decode(ids)) or rejected is None:
        message = stage.gateway.receive(Message)
        if isinstance(message, Reject):
            rejected = message
        elif isinstance(message, Text):
            text += "".join(message.texts)
    assert text == library.decode(ids)
    assert (rejected.rid, rejected.code) == (RID + 1, "context_length_exceeded")


def test_over_tcp_the_port_is_found_and_the_key_asked_for(model: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    key_file = tmp_path / "key"
    security = Security(ClusterKey.load(key_file))
    scheduler = Scheduler(base, locate(str(model)), security=security)
    process = Process(model, base, tmp_path / "log", "--cluster-key-file", str(key_file))
    try:
        address = scheduler.receive(Hello, 30).address
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d+", address)
        scheduler.send(scheduler.welcome)
        friend, stranger = Gateway(address, security=security), Gateway(address, security=Security(insecure_tcp=True))
        friend.receive(Welcome)
        assert stranger.receives_nothing(0.5)
        friend.close()
        stranger.close()
    finally:
        process.end()
        scheduler.close()


@pytest.mark.parametrize(
    ("advertise", "bound", "expected"),
    [
        ("", "ipc:///run/quire/tokenizer-0-ab", "ipc:///run/quire/tokenizer-0-ab"),
        ("", "tcp://10.0.0.7:7001", "tcp://10.0.0.7:7001"),
        ("", "tcp://0.0.0.0:7001", "tcp://127.0.0.1:7001"),
        ("tokenizer-host", "tcp://0.0.0.0:7001", "tcp://tokenizer-host:7001"),
        ("tokenizer-host:99", "tcp://0.0.0.0:7001", "tcp://tokenizer-host:99"),
        ("tcp://[fd00::1]:99", "tcp://0.0.0.0:7001", "tcp://[fd00::1]:99"),
        ("[fd00::1]", "tcp://0.0.0.0:7001", "tcp://[fd00::1]:7001"),
    ],
)
def test_the_advertised_address(advertise: str, bound: str, expected: str) -> None:
    assert advertised(advertise, bound, Endpoint("tcp://127.0.0.1:5000")) == expected


def test_it_imports_neither_torch_nor_transformers(model: Path) -> None:
    program = (
        "import sys, services.tokenizer.main\n"
        "from pathlib import Path\n"
        "from services.tokenizer.tokenizer import Tokenizer\n"
        f"Tokenizer.load(Path({str(model)!r}))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_address_is_one_line(model: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "services.cli", "tokenizer", str(model)], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 2
    assert process.stderr.strip().splitlines()[-1].startswith("quire tokenizer: --connect is missing")


@pytest.mark.parametrize("served", ["a/b model", builtin.NAME])
def test_a_tokenizer_of_another_model_ends_before_it_serves(model: Path, tmp_path: Path, served: str) -> None:
    base = f"ipc://{tmp_path}"
    scheduler = Scheduler(base, locate(str(model)))
    digest = builtin.SHA256 if served == builtin.NAME else "0123"
    scheduler.welcome = dataclasses.replace(scheduler.welcome, model_digest=digest, model_name=served)
    process = Process(model, base, tmp_path / "log")
    try:
        gateway = Gateway(scheduler.receive(Hello, 30).address)
        scheduler.send(scheduler.welcome)
        assert process.wait() == 2
        assert gateway.receives_nothing(0.2)
        gateway.close()
    finally:
        scheduler.close()
    wanted = "quire tokenizer" if served == builtin.NAME else "quire tokenizer 'a/b model'"
    last = process.log.read_text().splitlines()[-1]
    assert last.endswith(
        f"the server at {base} serves {served}, this tokenizer has {model}; start with: {wanted} --connect {base}"
    )


def test_a_flood_of_garbage_is_not_a_flood_of_log_lines(stage: Stage) -> None:
    for _ in range(500):
        stage.gateway.socket.send_multipart([b"\xff\xff", b"garbage"])
    for _ in range(500):
        assert "protocol version 255" in stage.gateway.receive(Fault).message
    lines = [line for line in stage.process.log.read_text().splitlines() if "malformed" in line]
    assert 1 <= len(lines) < 50 and lines[0].endswith("(1 in all)")


def test_a_server_gone_for_good_ends_a_tokenizer(model: Path, tmp_path: Path) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    scheduler = Scheduler(f"ipc://{sockets}", locate(str(model)))
    process = Process(model, f"ipc://{sockets}", tmp_path / "log")
    scheduler.receive(Hello, 30)
    scheduler.send(scheduler.welcome)
    scheduler.receive(Heartbeat)
    scheduler.close()
    shutil.rmtree(sockets)
    assert process.wait() == 1
    assert process.log.read_text().splitlines()[-1].endswith(f"the scheduler is gone: {sockets} no longer exists")
