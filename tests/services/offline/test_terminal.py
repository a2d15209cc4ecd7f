"""``quire chat`` and ``quire complete``, over pipes and in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.server import NULL, QUIRE, Server, serve

OPTIONS = ("--max-model-len", "256", "--null-step-ms", "20")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("terminal"), *NULL, *OPTIONS) as server:
        yield server


def piped(command: str, text: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*QUIRE, command, *argv], input=text, capture_output=True, text=True, timeout=60)


def whole(server: Server, path: str, **body: Any) -> str:
    with server.client() as client:
        answer = client.post(path, json={"temperature": 0, **body})
    choice = answer.raise_for_status().json()["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


GREEDY = ("--temperature", "0", "--max-tokens", "6")


def test_a_conversation_over_pipes(server: Server) -> None:
    """Each line is answered in the light of those before; only answers, and what commands say, are on stdout."""
    lines = "hello\n/system be brief\n/system\n\nagain\n/clear\nhello\n/exit\nnever asked\n"
    ended = piped("chat", lines, "--url", server.url, *GREEDY)
    assert (ended.returncode, ended.stderr) == (0, "")
    user, system = {"role": "user", "content": "hello"}, {"role": "system", "content": "be brief"}
    first = whole(server, "/v1/chat/completions", messages=[user], max_tokens=6)
    more = [user, {"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    second = whole(server, "/v1/chat/completions", messages=[system, *more], max_tokens=6)
    third = whole(server, "/v1/chat/completions", messages=[system, user], max_tokens=6)
    assert ended.stdout == f"{first}\nbe brief\n{second}\n{third}\n"


def test_one_question_on_a_server_of_its_own() -> None:
    ended = piped("chat", "", *NULL, *OPTIONS, *GREEDY, "-q", "hello", "--system-prompt", "be brief")
    assert (ended.returncode, ended.stderr) == (0, "") and len(ended.stdout) > 5


def test_complete_goes_on_with_all_of_stdin(server: Server) -> None:
    text = "The capital\nof France"
    wanted = whole(server, "/v1/completions", prompt=text, max_tokens=6)
    assert piped("complete", text + "\n", "--url", f"{server.url}/v1/", *GREEDY).stdout == wanted + "\n"
    assert piped("complete", "", "--url", server.url, *GREEDY, "--quick", text).stdout == wanted + "\n"


def test_what_goes_wrong_is_said_and_the_exit_code_tells(server: Server) -> None:
    ended = piped("chat", "/what\nhello\n" + "long " * 500 + "\n", "--url", server.url, *GREEDY)
    assert ended.returncode == 1 and len(ended.stdout.splitlines()) == 1
    first, second = ended.stderr.splitlines()
    assert first == "error: /what is no command; /help lists them" and "maximum context length is 256" in second
    ended = piped("complete", "a", "--url", "http://127.0.0.1:9")
    assert ended.returncode == 1 and "error: no answer from http://127.0.0.1:9" in ended.stderr
    ended = piped("complete", "a", "--url", server.url, "--temperature", "9")
    assert ended.returncode == 2 and "--temperature is 9.0, above its maximum of 2" in ended.stderr


def test_input_that_is_not_utf8_is_refused_in_one_line(server: Server) -> None:
    """It costs no other line, wherever it stands."""
    user = {"role": "user", "content": "hello"}
    wanted = whole(server, "/v1/chat/completions", messages=[user], max_tokens=6)
    command = [*QUIRE, "chat", "--url", server.url, *GREEDY]
    ended = subprocess.run(command, input=b"caf\xe9\n/\xe9\nhello\n", capture_output=True, timeout=60)
    first, second = ended.stderr.decode().splitlines()
    assert "error: messages: cannot be sent as JSON: str is not valid UTF-8" in first
    assert second.endswith("is no command; /help lists them")
    assert (ended.returncode, ended.stdout.decode()) == (1, wanted + "\n")
    complete = [*QUIRE, "complete", "--url", server.url]
    for argv, text in (([], b"caf\xe9\n"), (["-q", b"caf\xe9"], b"")):
        ended = subprocess.run([*complete, *argv], input=text, capture_output=True, timeout=60)
        assert (ended.returncode, ended.stdout) == (1, b"")
        assert ended.stderr.startswith(b"error: prompt: cannot be sent as JSON") and ended.stderr.count(b"\n") == 1


def _take_terminal() -> None:
    """Keys make signals, also where the tests run in the background and ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self.seen = ""
        self._fd, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [*QUIRE, *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, timeout: float = 20.0) -> str:
        """What was shown up to the end of ``pattern``; later calls look behind it."""
        deadline = time.monotonic() + timeout
        while (match := re.search(pattern, self.seen, re.DOTALL)) is None:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._fd], [], [], 0.1)[0]:
                self.seen += os.read(self._fd, 4096).decode(errors="replace")
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return shown

    def ended(self) -> int:
        code = self._process.wait(20)
        os.close(self._fd)  # earlier, it would be a hang-up
        return code


def test_ctrl_c_stops_an_answer_and_not_the_program(server: Server) -> None:
    terminal = Terminal("chat", "--url", server.url, "--temperature", "0", "--max-tokens", "150")
    terminal.wait_for("/help tells more.*> ")
    terminal.type("hello\n")
    terminal.wait_for("hello\r\n.{20}")
    terminal.type("\x03")
    terminal.wait_for(r"\[stopped\]")
    terminal.wait_for("> ")
    server.wait_for_metric("vllm:num_requests_running", 0, 5)
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.type("\x03")  # thrown away
    terminal.wait_for("> ")
    terminal.type("/clear\n/system\n")
    terminal.wait_for("no system prompt.*> ")
    terminal.type("again\n")
    terminal.wait_for(r"again\r\n.+\[cut off\].*> ")  # only readline takes Ctrl-D for an end
    terminal.type("\x04")
    assert terminal.ended() == 0
