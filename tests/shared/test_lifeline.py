from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

from shared.lifeline import ENV, Lifeline


def pair() -> tuple[socket.socket, Lifeline]:
    ours, theirs = socket.socketpair()
    environ = {ENV: str(theirs.detach())}
    line = Lifeline(environ)
    assert environ == {}  # grandchildren must not take it for theirs
    return ours, line


def test_without_a_launcher_nothing_happens() -> None:
    line = Lifeline({})
    assert not line.held
    line.beat()
    line.watch(lambda reason: None)


def test_beats_reach_the_launcher_from_loop_and_thread() -> None:
    ours, line = pair()
    with ours:
        ours.settimeout(5)

        async def once() -> None:
            line.beat_in(asyncio.get_running_loop())

        asyncio.run(once())
        assert ours.recv(10) == b"."
        line.beat_from_thread()
        assert ours.recv(10) == b"."


def test_a_launcher_that_does_not_read_blocks_nobody() -> None:
    ours, line = pair()
    with ours:
        for _ in range(100_000):
            line.beat()


CHILD = """
import sys
from shared.lifeline import Lifeline
line = Lifeline()
line.watch(lambda reason: print("reason:", reason, flush=True))
line.beat()
sys.stdin.read()
"""


def test_reasons_arrive_line_by_line_and_the_end_ends_the_process() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD],
                env={**os.environ, ENV: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        with child:
            ours.settimeout(10)
            assert ours.recv(10) == b"."
            ours.sendall(b"worker 0 was")
            ours.sendall(b" killed\nsecond\n")
            assert child.stdout is not None
            assert child.stdout.readline() == "reason: worker 0 was killed\n"
            assert child.stdout.readline() == "reason: second\n"
            ours.close()
            assert child.wait(5) == 1
