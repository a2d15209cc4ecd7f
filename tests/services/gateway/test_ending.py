"""How the process starts and ends: signals, the launcher's last word, the port."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from shared.wire import Goodbye
from tests.services.gateway.background import CHAT, Posted, Streamed
from tests.services.gateway.pipeline import Answer, Gateway, Pipeline, running


@pytest.fixture
def own() -> Iterator[Pipeline]:
    with running() as pipeline:
        yield pipeline


def stream(pipeline: Pipeline, client: httpx.Client) -> tuple[Streamed, Answer]:
    streamed = Streamed(client, "/v1/chat/completions", CHAT)
    answer = pipeline.tokenizer.submitted()
    answer.accept()
    streamed.opened()
    return streamed, answer


def refuses_connections(gateway: Gateway, timeout: float = 5.0) -> bool:
    due = time.monotonic() + timeout
    while time.monotonic() < due:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", gateway.port)):
                return True
        time.sleep(0.05)
    return False


def test_sigterm_lets_open_streams_finish(own: Pipeline) -> None:
    gateway = own.gateway()
    with gateway.client() as client:
        streamed, answer = stream(own, client)
        gateway.process.send_signal(signal.SIGTERM)
        assert refuses_connections(gateway)
        answer.text("late")
        answer.finish("stop")
        *chunks, done = streamed.rest()
        assert done == "[DONE]" and "late" in str(chunks) and "error" not in str(chunks)
    assert gateway.process.wait(10) == 0
    assert own.scheduler.expect(Goodbye).reason


def test_sigterm_ends_what_takes_too_long(own: Pipeline) -> None:
    gateway = own.gateway("--shutdown-timeout=0.5")
    with gateway.client() as client:
        streamed, _ = stream(own, client)
        gateway.process.send_signal(signal.SIGTERM)
        *_, error, done = streamed.rest()
        assert "shutting down" in error["error"]["message"] and done == "[DONE]"
    assert gateway.process.wait(10) == 0


def test_new_requests_get_503_while_draining(own: Pipeline) -> None:
    """A request whose body was under way when the signal came."""
    gateway = own.gateway()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as sock, gateway.client() as client:
        _, answer = stream(own, client)
        sock.sendall(head)  # the body comes only after the signal
        time.sleep(0.2)
        gateway.process.send_signal(signal.SIGTERM)
        assert refuses_connections(gateway)
        sock.sendall(b'{"prompt": "a"}')
        sock.settimeout(5)
        received = b""
        while chunk := sock.recv(65536):
            received += chunk
        assert received.startswith(b"HTTP/1.1 503") and b"shutting down" in received
        answer.finish("stop")
    assert gateway.process.wait(10) == 0


def test_sigint_ends_open_streams_with_an_error(own: Pipeline) -> None:
    gateway = own.gateway()
    with gateway.client() as client:
        streamed, _ = stream(own, client)
        whole = Posted(client, "/v1/chat/completions", CHAT)
        own.tokenizer.submitted()
        gateway.process.send_signal(signal.SIGINT)
        gateway.process.send_signal(signal.SIGINT)  # as from terminal and launcher at once
        *_, error, done = streamed.rest()
        assert "interrupted" in error["error"]["message"] and done == "[DONE]"
        assert whole.response().status_code == 503
    assert gateway.process.wait(5) == 0


def test_a_second_signal_kills(own: Pipeline) -> None:
    gateway = own.gateway()
    with gateway.client() as client:
        stream(own, client)
        gateway.process.send_signal(signal.SIGTERM)
        time.sleep(1.2)
        assert gateway.process.poll() is None
        gateway.process.send_signal(signal.SIGINT)
        assert gateway.process.wait(5) == 1


def test_the_launchers_reason_reaches_open_streams(own: Pipeline) -> None:
    read_end, write_end = (end.detach() for end in socket.socketpair())
    os.set_inheritable(read_end, True)
    gateway = own.gateway(env={"QUIRE_LIFELINE_FD": str(read_end)})
    os.close(read_end)
    try:
        with gateway.client() as client:
            streamed, _ = stream(own, client)
            os.write(write_end, b"worker 0 was killed by signal 9\n")
            *_, error, done = streamed.rest()
            assert error["error"]["message"] == "worker 0 was killed by signal 9" and done == "[DONE]"
        assert gateway.process.wait(3) == 1
    finally:
        os.close(write_end)


def test_it_ends_with_its_launcher(own: Pipeline) -> None:
    read_end, write_end = (end.detach() for end in socket.socketpair())
    os.set_inheritable(read_end, True)
    gateway = own.gateway(env={"QUIRE_LIFELINE_FD": str(read_end)})
    os.close(read_end)
    os.close(write_end)
    assert gateway.process.wait(5) == 1


def run(*options: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "services.cli", "gateway", *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


def test_port_in_use() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        ended = run("--connect=ipc:///tmp/nowhere", f"--port={port}")
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert f"127.0.0.1:{port}" in line and "in use" in line


def test_operator_mistakes_are_one_line() -> None:
    for options, part in (
        ([], "--connect"),
        (["--connect=nowhere"], "nowhere"),
        (["--connect=tcp://127.0.0.1:5000", "--port=0"], "--cluster-key-file"),
        (["--connect=ipc:///tmp/x", "--port=70000"], "70000"),
        (["--connect=ipc:///tmp/x", "--fd=999"], "--fd 999"),
        (["--connect=tcp://*:5", "--insecure-tcp", "--fd=999"], "tcp://*:5"),  # before any port
        (["--connect=ipc:///tmp/" + "x" * 100, "--fd=999"], "the limit is 107"),
        (["--connect=ipc:///tmp/x", "--api-key", ""], "--api-key"),
        (["--connect=ipc:///tmp/x", "--api-key", "a,b"], "--api-key"),
    ):
        ended = run(*options)
        assert ended.returncode == 2 and part in ended.stderr.splitlines()[-1], ended.stderr


def test_no_model_code_is_imported() -> None:
    """A gateway stays small: neither torch nor transformers comes in by any way."""
    code = (
        "import sys, services.gateway.main; print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_server_gone_for_good_ends_a_gateway() -> None:
    with running() as pipeline:
        gateway = pipeline.gateway()
        pipeline.scheduler.close()
        shutil.rmtree(pipeline.directory)
        assert gateway.process.wait(20) == 1
        [line] = [line for line in gateway.output().splitlines() if "no longer exists" in line and "ending:" in line]
        assert f"scheduler is gone: {pipeline.directory} no longer exists" in line


def test_a_silent_scheduler_is_waited_for_while_its_directory_is_there() -> None:
    with running() as pipeline:
        gateway = pipeline.gateway()
        pipeline.scheduler.muted = True
        pipeline.scheduler.close()
        gateway.wait_answering("/health", 503)
        time.sleep(1.5)  # one more look at the directory
        assert gateway.process.poll() is None
