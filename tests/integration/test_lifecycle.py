"""What starts, what dies, and what a client sees of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.server import NULL, Server, run, serve

SLOW = (*NULL, "--null-step-ms", "20")


class OpenStream:
    """A streamed completion being read in a thread: its events, and when the last came."""

    def __init__(self, server: Server, max_tokens: int = 1500) -> None:
        self.events: list[str] = []
        self.status = 0
        self.error: BaseException | None = None
        self._server, self._max_tokens = server, max_tokens
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        body = {"model": self._server.model, "prompt": "Once", "max_tokens": self._max_tokens, "stream": True}
        body["ignore_eos"] = True
        try:
            with self._server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:])
        except Exception as error:  # the reader reports it to the test's own thread
            self.error = error

    def wait_for_events(self, count: int, timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while len(self.events) < count:
            assert time.monotonic() < deadline, f"{len(self.events)} events, status {self.status}, {self.error!r}"
            time.sleep(0.01)

    def ended_with_error(self, timeout: float) -> str:
        """The message of the error event that ended the stream in time."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the stream is still open"
        assert self.error is None, repr(self.error)
        assert self.events[-1] == "[DONE]"
        return str(json.loads(self.events[-2])["error"]["message"])


def complaints(server: Server) -> list[str]:
    """What was logged as more than INFO: an end that somebody asked for is no error of any process."""
    return [line for line in server.log.read_text().splitlines() if " INFO " not in line]


@pytest.mark.parametrize("role", ["worker", "scheduler", "tokenizer"])
def test_death_of_a_child_ends_open_streams_with_its_name(tmp_path: Path, role: str) -> None:
    """vLLM 39863, 16259, 48966: clients waited on, and the server ended as if all were well."""
    with serve(tmp_path, *SLOW) as server:
        stream = OpenStream(server)
        stream.wait_for_events(3)
        server.children(role)[0].kill()
        message = stream.ended_with_error(timeout=5)
        assert role in message
        assert server.wait(timeout=10) == 1
        assert role in server.log.read_text()


def test_death_of_a_gateway_ends_the_server(tmp_path: Path) -> None:
    with serve(tmp_path, *SLOW) as server:
        stream = OpenStream(server)
        stream.wait_for_events(3)
        server.children("gateway")[0].kill()
        assert server.wait(timeout=10) == 1


def test_death_of_the_launcher_leaves_no_process(tmp_path: Path) -> None:
    with serve(tmp_path, *SLOW) as server:
        OpenStream(server).wait_for_events(3)
        children = server.children()
        assert len(children) == 4
        server.children("tokenizer")[0].send_signal(signal.SIGSTOP)  # even one that cannot notice
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive


@pytest.mark.parametrize("role", ["scheduler", "worker", "tokenizer"])
def test_a_hung_process_counts_as_dead(tmp_path: Path, role: str) -> None:
    """vLLM 46611: who waited for a worker that had stalled waited for ever, and nobody was named."""
    with serve(tmp_path, *SLOW) as server:
        stream = OpenStream(server)
        stream.wait_for_events(3)
        server.children(role)[0].send_signal(signal.SIGSTOP)
        assert role in stream.ended_with_error(timeout=7)
        assert server.wait(timeout=10) == 1
        assert role in server.log.read_text().split("ERROR launcher: ")[1].splitlines()[0]


def test_a_hung_gateway_ends_the_server(tmp_path: Path) -> None:
    with serve(tmp_path, *NULL) as server:
        server.children("gateway")[0].send_signal(signal.SIGSTOP)
        assert server.wait(timeout=15) == 1
        assert "gateway 0 has hung" in server.log.read_text()


def test_interrupt_ends_streams_and_the_server_in_five_seconds(tmp_path: Path) -> None:
    with serve(tmp_path, *SLOW) as server:
        stream = OpenStream(server)
        stream.wait_for_events(3)
        server.signal(signal.SIGINT)
        assert server.wait(timeout=5) == 0
        assert "interrupted" in stream.ended_with_error(timeout=1)
        [told] = complaints(server)
        assert told.endswith("WARNING gateway 0: ending 1 open requests: the server was interrupted")


def test_terminate_lets_open_streams_finish(tmp_path: Path) -> None:
    """vLLM 24885, kserve PR 5496: streams were cut."""
    with serve(tmp_path, *SLOW, "--gateways", "2", "--tokenizers", "2") as server:
        stream = OpenStream(server, max_tokens=60)
        stream.wait_for_events(3)
        server.signal(signal.SIGTERM)
        assert server.wait(timeout=30) == 0
        assert stream.events[-1] == "[DONE]"
        assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
        assert complaints(server) == []


def test_two_servers_on_one_host(tmp_path: Path) -> None:
    """vLLM 24756, 28498: both took the same free port."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with serve(first, *NULL) as one, serve(second, *NULL) as two:
        for server in (one, two):
            with server.client() as client:
                body = {"model": server.model, "prompt": "Hi", "max_tokens": 3}
                assert client.post("/v1/completions", json=body).status_code == 200


def test_a_killed_launch_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with serve(tmp_path, *NULL, env=env) as server:
        children = server.children()
        server.process.kill()
        psutil.wait_procs(children, timeout=5)
    assert list(tmp_path.glob("quire-*"))
    with serve(tmp_path, *NULL, env=env) as server:
        assert len(list(tmp_path.glob("quire-*"))) == 1
    assert not list(tmp_path.glob("quire-*"))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["/nonexistent/model"], "/nonexistent/model"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--bind", "tcp://127.0.0.1:5555"], "--cluster-key-file"),
        (["--kv-cache-memory-bytes", "1k"], "block"),
    ],
)
def test_a_server_that_cannot_work_says_so_in_one_line(argv: list[str], complaint: str) -> None:
    result = run("serve", "--port", "0", *argv)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = run("serve", "--port", str(port), *NULL)
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in result.stderr


def test_idle_processes_use_no_cpu(tmp_path: Path) -> None:
    """All processes together under two percent of a core (vLLM 14799, 19036: a whole one).

    CPU time is counted, so a busy machine does not matter.
    """
    with serve(tmp_path, *NULL) as server:
        time.sleep(2)
        processes = [psutil.Process(server.process.pid), *server.children()]

        def spent() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        before, seconds = spent(), 10
        time.sleep(seconds)
        assert spent() - before < 0.02 * seconds + 1 / os.sysconf("SC_CLK_TCK")
