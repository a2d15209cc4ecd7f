"""What reaches stderr, told by running the logging set-up in a process of its own."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from shared.log import LimitedLog

SCRIPT = """
import logging
from shared.log import configure
configure("gateway 0", "info")
log = logging.getLogger("x")
log.info("path %s", "/a\\n11-30 INFO forged\\r\\x1b[31m\\x85\\u2028 안녕")
try:
    raise ValueError("first\\n11-30 INFO forged\\x1b[0m")
except ValueError:
    log.exception("failed")
"""


def test_nothing_logged_can_look_like_another_record() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=True)
    first, second, *traceback = done.stderr.splitlines()
    assert first.endswith(r"INFO gateway 0: path /a\n11-30 INFO forged\r\x1b[31m\x85\u2028 안녕")
    assert second.endswith("ERROR gateway 0: failed")
    assert traceback[0] == "  Traceback (most recent call last):"
    assert traceback[-2:] == ["  ValueError: first", r"  11-30 INFO forged\x1b[0m"]


def test_a_limited_log_writes_one_line_a_second_and_counts_all(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    limited = LimitedLog(logging.getLogger("limited"), clock=lambda: now[0])
    for at in (100.0, 100.5, 100.9, 101.1, 101.2, 102.5):
        now[0] = at
        limited.warning("bad %s", at)
    assert caplog.messages == ["bad 100.0 (1 in all)", "bad 101.1 (4 in all)", "bad 102.5 (6 in all)"]
