"""The scheduler and null workers as real processes."""

from __future__ import annotations

from pathlib import Path

from tests.services.scheduler.process import running


def test_a_request_runs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with running(tmp_path) as (_, client):
        client.submit(1 << 48 | 1, list(range(40)), 20)
        client.wait_for(lambda: client.done)
        assert len(client.outputs[1 << 48 | 1, 0]) == 20
        assert client.finished[1 << 48 | 1, 0].reason == "length"
        status = client.wait_for(lambda: (s := client.query("status").body)["requests"] == 0 and s)
        assert (status["running"], status["waiting"], status["blocks_used"]) == (0, 0, 0)
