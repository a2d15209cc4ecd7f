from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.lifeline import ENV, Lifeline

HEAD = """
import asyncio, os, sys
from shared.lifeline import ENV, Lifeline
line = Lifeline()
assert line.held and ENV not in os.environ  # grandchildren must not take it for theirs
"""
WATCH = 'line.watch(lambda reason: print("reason:", reason, flush=True)); line.beat(); sys.stdin.read()'
LOOP = """
async def main():
    line.beat_in(asyncio.get_running_loop())
    await asyncio.sleep(20)
asyncio.run(main())
"""
THREAD = "line.beat_from_thread(); sys.stdin.read()"
FLOOD = "[line.beat() for _ in range(100_000)]; print('done', flush=True)"


@contextmanager
def child(script: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A process that runs ``script`` on its end of a lifeline, and the launcher's end."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + script],
            env={**os.environ, ENV: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    ours.settimeout(10)
    with process, ours:
        try:
            yield process, ours
        finally:
            process.kill()


def test_without_a_launcher_nothing_happens() -> None:
    line = Lifeline({})
    assert not line.held
    line.beat()
    line.watch(lambda reason: None)


@pytest.mark.parametrize("script", [LOOP, THREAD])
def test_beats_reach_the_launcher(script: str) -> None:
    with child(script) as (_, ours):
        assert ours.recv(1) + ours.recv(1) == b".."


def test_a_launcher_that_does_not_read_blocks_nobody() -> None:
    with child(FLOOD) as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"


def test_reasons_arrive_line_by_line_and_the_end_ends_the_process() -> None:
    with child(WATCH) as (process, ours):
        assert ours.recv(10) == b"."
        ours.sendall(b"worker 0 was")
        ours.sendall(b" killed\nsecond\n")
        assert process.stdout is not None
        assert process.stdout.readline() == "reason: worker 0 was killed\n"
        assert process.stdout.readline() == "reason: second\n"
        ours.close()
        assert process.wait(5) == 1


CALLED = """
async def main():
    ended = asyncio.Event()
    line.call_at_end(asyncio.get_running_loop(), ended.set)
    print("waiting", flush=True)
    await ended.wait()
    print("in order", flush=True)
asyncio.run(main())
"""


def test_a_process_may_end_in_an_order_of_its_own() -> None:
    with child(CALLED) as (process, ours):
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        ours.sendall(b"words are not the end\n")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        ours.close()
        assert process.stdout.readline() == "in order\n" and process.wait(5) == 0
