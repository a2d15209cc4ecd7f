"""The benchmark of sampling, small."""

from __future__ import annotations

from tests.benchmarks.test_commands import run


def test_sampling() -> None:
    ended = run("benchmarks.sampling", "--requests", "3", "--tokens", "4", "--rounds", "1", "--", "--worker", "null")
    assert ended.returncode == 0, ended.stderr
    rows = [line.strip("| ").split(" | ") for line in ended.stdout.splitlines()]
    assert [row[0] for row in rows[2:]] == ["greedy", "temperature", "top-p, top-k, min-p", "penalties", "all mixed"]
    assert rows[2][2] == "1.00" and all(float(row[1]) > 0 for row in rows[2:])
