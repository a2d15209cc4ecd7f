"""compose.yaml on a real Docker engine, as its operator uses it: up, scale while streams run, a death, down.

Builds the images, which takes minutes the first time, so it only runs when asked for. The chat is answered by the real
model; where streams have to be long and steady whatever the machine, the null worker takes its place.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.models import builtin
from tests.integration.server import free_port

ROOT = Path(__file__).parents[2]
READY_LIMIT = 240.0  # seconds; the first start converts the model's weights
STREAM_LIMIT = 120.0
LONG = 1500  # tokens; over a minute of the null worker
NULL_WORKER = f"""
services:
  worker:
    environment:
      QUIRE_WORKER: "null"
      QUIRE_NULL_STEP_MS: "50"
      QUIRE_MODEL: /var/cache/quire/builtin/{builtin.FILE}  # named, so that it takes its vocabulary
"""
DEATH_LIMIT = 5.0  # seconds after which no stream of a dead process may still look alive


def _engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=30).returncode == 0


def _why_not() -> str:
    if os.environ.get("QUIRE_TEST_COMPOSE") != "1":
        return "builds images and starts containers: asked for with QUIRE_TEST_COMPOSE=1"
    return "" if _engine_answers() else "QUIRE_TEST_COMPOSE=1 is set, but no Docker engine answers `docker info`"


REASON = _why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.timeout(1800)]


class Deployment:
    """A compose project of its own name, with the front's port published on a free port of the loopback."""

    def __init__(self) -> None:
        self.project = f"quire-test-{os.getpid()}"
        self.port = free_port()
        v2 = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
        self._command = ["docker", "compose"] if v2 else ["docker-compose"]
        self.files = [str(ROOT / "compose.yaml")]
        self._env = os.environ | {
            "QUIRE_PUBLISH": f"127.0.0.1:{self.port}",
            "QUIRE_DTYPE": "float32",
            "QUIRE_KV_CACHE_MEMORY_BYTES": "512MiB",
            "QUIRE_ACCESS_LOG": "1",
        }

    def compose(self, *args: str, timeout: float = 300) -> str:
        files = [word for file in self.files for word in ("--file", file)]
        command = [*self._command, "--project-name", self.project, *files, *args]
        done = subprocess.run(command, cwd=ROOT, env=self._env, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def up(self, *args: str) -> None:
        self.compose("up", "-d", "--no-build", *args)

    def containers(self, service: str = "") -> list[str]:
        """Ids of the containers of a service, or of all, in the order they were started; stopped ones included."""
        labels = [f"label=com.docker.compose.project={self.project}"]
        if service:
            labels.append(f"label=com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", label)]
        return docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()[::-1]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=STREAM_LIMIT, trust_env=False)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def chat(self, prompt: str) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 20}
        with self.client() as client:
            return client.post("/v1/chat/completions", json=body)

    def serves(self) -> bool:
        """Whether a request is answered. After a death one may be refused, until all have noticed what is gone."""
        return self.chat("Hello").status_code == 200

    def metric(self, name: str) -> float:
        samples = [line for line in self.get("/metrics").text.splitlines() if line.split("{")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


def docker(*args: str) -> str:
    done = subprocess.run(["docker", *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"docker {' '.join(args)}: {done.stderr}"
    return done.stdout


def inspect(container: str) -> dict[str, Any]:
    (found,) = json.loads(docker("inspect", container))
    return dict(found)


def logs(container: str) -> str:
    done = subprocess.run(["docker", "logs", container], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def wait_until(true: Callable[[], bool], what: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {timeout:.0f} s"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """Three tokenizers and two gateways on the built-in model, ready. Nothing of it is left afterwards."""
    it = Deployment()
    try:
        it.compose("build", timeout=1500)
        it.up("--scale", "tokenizer=3", "--scale", "gateway=2")
        wait_until(it.ready, "ready", READY_LIMIT)
        yield it
    finally:
        it.compose("down", "--volumes", "--remove-orphans")
        assert it.containers() == []


@pytest.fixture(scope="module")
def steady(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment with a null worker: 20 tokens per second and stream, at next to no cost."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as override:
        override.write(NULL_WORKER)
        override.flush()
        deployment.files.append(override.name)
        deployment.up("--no-deps", "worker")
        wait_until(lambda: "'null'" in logs(deployment.containers("worker")[-1]), "the null worker runs", 60)
        wait_until(deployment.serves, "the null worker serves", READY_LIMIT)
        yield deployment
        deployment.files.remove(override.name)


@dataclass
class Stream:
    """One streamed chat: its events so far, and whether it ended as the protocol says."""

    max_tokens: int
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    failure: str = ""

    def run(self, deployment: Deployment) -> None:
        body = {
            "messages": [{"role": "user", "content": "Tell me about lighthouses."}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            with deployment.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    self.failure = f"{answer.status_code}: {answer.read().decode()}"
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self.events.append(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            self.failure = repr(error)

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event for event in self.events if "error" in event]

    @property
    def text(self) -> str:
        return "".join(
            choice["delta"].get("content") or "" for event in self.events for choice in event.get("choices", [])
        )

    def check_whole(self) -> None:
        assert self.failure == ""
        assert self.errors == []
        assert self.done
        assert self.events[-1]["usage"]["completion_tokens"] == self.max_tokens


@contextmanager
def pump(deployment: Deployment, clients: int, max_tokens: int) -> Iterator[list[Stream]]:
    """Clients that ask again as soon as they are answered, while the block runs. Yields all their streams so far."""
    streams: list[Stream] = []
    stopping = threading.Event()

    def keep_asking() -> None:
        while not stopping.is_set():
            streams.append(stream := Stream(max_tokens))
            stream.run(deployment)
            if stream.failure:
                return

    threads = [threading.Thread(target=keep_asking) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        stopping.set()
        for thread in threads:
            thread.join(STREAM_LIMIT)


def test_it_serves_a_chat(deployment: Deployment) -> None:
    answer = deployment.chat("What is the capital of France?").raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_nothing_runs_as_root_or_can_write_its_own_files(deployment: Deployment) -> None:
    for container in deployment.containers():
        assert docker("exec", container, "id", "-u").strip() == "10001"
        limits = inspect(container)["HostConfig"]
        assert limits["ReadonlyRootfs"]
        assert limits["CapDrop"] == ["ALL"]
    published = [port for one in deployment.containers() for port in docker("port", one).split("\n") if port]
    assert published == [f"8000/tcp -> 127.0.0.1:{deployment.port}"]


def test_health_checks_of_all_become_healthy(deployment: Deployment) -> None:
    def healthy(container: str) -> bool:
        return bool(inspect(container)["State"]["Health"]["Status"] == "healthy")

    # Docker asks for the first time 30 s after a container's start.
    wait_until(lambda: all(map(healthy, deployment.containers())), "all healthy", 90)


def test_events_arrive_while_the_stream_still_runs_and_leaving_it_cancels_it(steady: Deployment) -> None:
    body = {"prompt": "Once", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with steady.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        for _ in range(3):
            next(lines)
            assert steady.metric("vllm:num_requests_running") == 1
    wait_until(lambda: steady.metric("vllm:num_requests_running") == 0, "cancelled", 10)
    wait_until(lambda: steady.metric("vllm:kv_cache_usage_perc") == 0, "memory given back", 10)


def test_new_gateways_and_tokenizers_get_work_and_no_stream_breaks(steady: Deployment) -> None:
    before = {*steady.containers("gateway"), *steady.containers("tokenizer")}
    with pump(steady, clients=8, max_tokens=60) as streams:
        wait_until(lambda: any(stream.events for stream in streams), "a stream begins", STREAM_LIMIT)
        steady.up("--no-recreate", "--scale", "tokenizer=4", "--scale", "gateway=3")
        (gateway,) = set(steady.containers("gateway")) - before
        (tokenizer,) = set(steady.containers("tokenizer")) - before
        wait_until(lambda: "POST /v1/chat/completions 200" in logs(gateway), "the new gateway serves", STREAM_LIMIT)
        # And back again: what the newest had open, they finish.
        wait_until(lambda: stopped_while_it_worked(tokenizer), "the new tokenizer works", STREAM_LIMIT)
        docker("stop", "--time", "60", gateway)
    for stream in streams:
        stream.check_whole()
    assert len({stream.text for stream in streams}) == 1  # all asked the same
    for container in (gateway, tokenizer):
        assert inspect(container)["State"]["ExitCode"] == 0


def stopped_while_it_worked(tokenizer: str) -> bool:
    """Stops a tokenizer, which tells how many requests it finishes first; starts it again when that was none."""
    docker("stop", "--time", "60", tokenizer)
    count = int(logs(tokenizer).rpartition("draining ")[2].split()[0])
    if count == 0:
        docker("start", tokenizer)
        time.sleep(5)
    return count > 0


@pytest.mark.parametrize("service", ["worker", "scheduler", "tokenizer"])
def test_a_killed_container_ends_its_streams_with_an_error_and_the_rest_recovers(
    steady: Deployment, service: str
) -> None:
    wait_until(steady.ready, "ready", READY_LIMIT)
    streams = [Stream(LONG) for _ in range(3)]
    threads = [threading.Thread(target=stream.run, args=(steady,)) for stream in streams]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(stream.text for stream in streams), "all stream text", STREAM_LIMIT)
    for container in steady.containers(service):
        subprocess.run(["docker", "kill", container], capture_output=True, timeout=30)
    deadline = time.monotonic() + DEATH_LIMIT + 2  # some of it is Docker's own work
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"a stream still hangs after the death of the {service}"
    for stream in streams:
        assert stream.failure == ""
        assert stream.errors, f"ended without an error event: {stream.events[-1]}"
        assert stream.done
    # A killed container counts as stopped by hand; one that died by itself would have been restarted.
    steady.up("--no-recreate", "--scale", "tokenizer=3", "--scale", "gateway=2")
    wait_until(steady.serves, "it serves again", READY_LIMIT)


def test_what_dies_by_itself_is_started_again(steady: Deployment) -> None:
    wait_until(steady.serves, "it serves", READY_LIMIT)
    (worker,) = steady.containers("worker")
    before = inspect(worker)["RestartCount"]
    subprocess.run(["docker", "exec", worker, "sh", "-c", "kill -KILL -1"], timeout=60)  # all but the init
    wait_until(lambda: inspect(worker)["RestartCount"] > before, "started again", 60)
    wait_until(steady.serves, "it serves again", READY_LIMIT)


def test_stop_ends_streams_with_an_error_event_and_kills_nothing(steady: Deployment) -> None:
    wait_until(steady.ready, "ready", READY_LIMIT)
    stream = Stream(LONG)
    thread = threading.Thread(target=stream.run, args=(steady,))
    thread.start()
    wait_until(lambda: stream.text != "", "the stream begins", STREAM_LIMIT)
    steady.compose("stop")
    thread.join(DEATH_LIMIT)
    assert not thread.is_alive()
    assert (stream.failure, bool(stream.errors), stream.done) == ("", True, True)
    states = {one: inspect(one)["State"] for one in steady.containers()}
    assert {state["Status"] for state in states.values()} == {"exited"}
    killed = [logs(one) for one, state in states.items() if state["ExitCode"] == 137]
    assert killed == []
