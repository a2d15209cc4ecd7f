"""The image's health check, run as Docker runs it, on real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.server import free_port

QUIRE = str(Path(sys.executable).with_name("quire"))
SCRIPT = Path(__file__).parents[2] / "deploy" / "healthcheck.py"
START_LIMIT = 30.0

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ``quire`` with arguments and environment variables; ends them all afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*argv: str, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([QUIRE, *argv], env=os.environ | env, stderr=subprocess.DEVNULL)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait(10)


def check(pid: int) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(SCRIPT), str(pid)], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stderr.strip()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until ``process`` listens on ``port``."""
    deadline = time.monotonic() + START_LIMIT
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, f"it ended with code {process.returncode}"
            assert time.monotonic() < deadline, f"nothing listens on port {port} after {START_LIMIT:.0f} s"
            time.sleep(0.05)


def test_a_scheduler_is_healthy_while_its_loop_answers(start: Start, tmp_path: Path) -> None:
    port = free_port()
    key = {"QUIRE_CLUSTER_KEY_FILE": str(tmp_path / "key")}
    scheduler = start("scheduler", "--bind", f"tcp://0.0.0.0:{port}", **key)
    wait_for(port, scheduler)
    assert check(scheduler.pid) == (0, "")
    scheduler.send_signal(signal.SIGSTOP)  # its port still accepts
    assert check(scheduler.pid) == (1, f"tcp://127.0.0.1:{port}: no answer within 3000 ms")


@pytest.mark.parametrize("given", ["command line", "environment"])
def test_a_gateway_is_asked_where_it_listens(start: Start, tmp_path: Path, given: str) -> None:
    port = free_port()
    connect = ["--connect", f"ipc://{tmp_path}"]
    if given == "environment":
        gateway = start("gateway", *connect, QUIRE_HOST="0.0.0.0", QUIRE_PORT=str(port))
    else:
        gateway = start("gateway", *connect, "--host=127.0.0.1", "--port", str(port), QUIRE_PORT="1")
    wait_for(port, gateway)
    code, problem = check(gateway.pid)  # there is no scheduler, and it says so itself
    assert code == 1
    assert problem.startswith(f"http://127.0.0.1:{port}/ready: 503 ")


def test_a_worker_is_healthy_while_it_runs_and_is_connected(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as workers:
        port = workers.getsockname()[1]
        connect = ["--connect", f"tcp://127.0.0.1:{port - 1}", "--insecure-tcp"]
        worker = start("worker", "--worker", "null", "--max-model-len", "1024", *connect)
        workers.settimeout(START_LIMIT)
        connection, _ = workers.accept()
        with connection:
            assert check(worker.pid) == (0, "")
            worker.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
            assert check(worker.pid) == (1, f"process {worker.pid} is stopped or dead (state T)")


def test_a_worker_without_a_scheduler_is_not_healthy(start: Start) -> None:
    port = free_port()
    worker = start("worker", "--worker", "null", "--connect", f"tcp://127.0.0.1:{port}", "--insecure-tcp")
    time.sleep(0.5)  # it is not connected at any later time either
    assert check(worker.pid) == (1, f"no connection to the scheduler at tcp://127.0.0.1:{port + 1}")


def test_what_is_not_quire_is_not_checked() -> None:
    assert check(os.getpid()) == (1, "no quire process runs here")
