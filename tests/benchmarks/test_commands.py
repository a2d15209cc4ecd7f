"""The commands themselves, small: real servers, a real table, and nothing left running."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.compare import chosen_engines, parse
from benchmarks.engines import EngineError, from_file
from benchmarks.pipeline import CLIENT

IN_PROCESS = """
import json, sys, time
load = json.load(open(sys.argv[1]))
count = sum(one["max_tokens"] for one in load["requests"])
ids = [[0] * one["max_tokens"] for one in load["requests"]]
print(json.dumps({"output_tokens_per_s": count, "ids": ids, "ttft_s": [0.5], "tpot_s": [float(sys.argv[2])]}))
"""


def run(module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def servers(name: Path) -> list[list[str]]:
    """Command lines of running processes of servers that serve a model under this name."""
    lines = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    return [line for line in lines if "services.cli" in line and str(name) in line and "serve" in line]


def rounds_of(results: dict[str, Any], engine: str) -> list[dict[str, Any]]:
    return [one for one in results["rounds"] if one["engine"] == engine]


def test_compare(tmp_path: Path) -> None:
    (tmp_path / "in_process.py").write_text(IN_PROCESS)
    peers = tmp_path / "peers.toml"
    peers.write_text(
        f'[other]\nrun = "{sys.executable} {tmp_path}/in_process.py {{file}} {{concurrency}}"\nrequests = 3\n'
    )
    target = tmp_path / "results.json"
    null = f"--worker null --served-model-name {tmp_path}"
    quire = ("--quire", f"fast={null}", "--quire", f"slow={null} --null-step-ms 20")
    sizes = ("--rest", "0", "--rounds", "2", "--requests", "6", "--output", "8", "--input", "16")
    ended = run("benchmarks.compare", *quire, "--load", "fixed:3", *sizes, "--peers", str(peers), "--json", str(target))
    assert ended.returncode == 0, ended.stderr
    assert servers(tmp_path) == []
    results = json.loads(target.read_text())
    for name in ("fast", "slow"):
        rounds = rounds_of(results, name)
        assert [one["tokens"] for one in rounds] == [48, 48]
        assert [one["faults"] for one in rounds] == [[], []]
        assert all(20 << 20 < one["metrics"]["memory"] < 4 << 30 for one in rounds)
    for one in rounds_of(results, "slow"):
        assert one["metrics"]["tpot_p50"] >= 0.019  # what a step takes
    for one in rounds_of(results, "other"):
        assert one["metrics"]["tokens_per_s"] == 24  # three of the requests, eight tokens each
        assert (one["metrics"]["ttft_p50"], one["metrics"]["tpot_p50"]) == (0.5, 3)
    assert [name for name in ("fast / slow", "fast / other", "0 of 12", "0 of 6") if name not in ended.stdout] == []
    # The null worker is deterministic: the two servers agree on every id.
    (row,) = (line for line in ended.stdout.splitlines() if line.startswith("| slow "))
    assert "| 100% " in row


def test_compare_ends_its_servers_when_it_is_told_to_end(tmp_path: Path) -> None:
    args = f"quire=--worker null --served-model-name {tmp_path}"
    command = [sys.executable, "-m", "benchmarks.compare", "--quire", args, "--load", "fixed:1"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        deadline = time.monotonic() + 60
        while not servers(tmp_path):
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
    assert servers(tmp_path) == []


def test_pipeline(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    sizes = ("--streams", "8", "--requests", "16", "--output", "16", "--input", "8", "--rounds", "1")
    ended = run("benchmarks.pipeline", *sizes, "--step-ms", "10", "--json", str(target))
    assert ended.returncode == 0, ended.stderr
    quire, bare = json.loads(target.read_text())["runs"]
    assert set(quire["usage"]) == {"serve 0", "scheduler 0", "worker 0", "tokenizer 0", "gateway 0", CLIENT}
    assert set(bare["usage"]) == {"server 0", CLIENT}
    assert bare["events_per_token"] == 1
    assert 0 < quire["events_per_token"] <= 1


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(IN_PROCESS + "sys.exit(3 if count == 8 else 0)")
    peers, target = tmp_path / "peers.toml", tmp_path / "results.json"
    peers.write_text(f'[other]\nrun = "{sys.executable} {tmp_path}/fails.py {{file}} 1"\n')
    load = ("--quire", "null=--worker null", "--load", "fixed:1", "--requests", "2", "--output", "4", "--rounds", "1")
    ended = run("benchmarks.compare", "--rest", "0", *load, "--peers", str(peers), "--json", str(target))
    assert ended.returncode == 2
    assert "other ended with code 3" in ended.stderr
    assert [one["engine"] for one in json.loads(target.read_text())["rounds"]] == ["null"]


def test_a_server_that_cannot_start_is_told() -> None:
    ended = run("benchmarks.compare", "--quire", "quire=--no-such-flag", "--load", "fixed:1")
    assert ended.returncode == 2
    assert "quire exited with code 2 before it was ready" in ended.stderr
    assert "--no-such-flag" in ended.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[a]\nstart = "$NO_SUCH_VARIABLE/x {port}"', "NO_SUCH_VARIABLE is not set"),
        ('[a]\nstart = "x {port}"\nrun = "y"', "'start' or 'run', not both"),
        ("[a]\nmodel = 'x'", "give 'start', 'run', or the 'url'"),
        ("[a]\ncolour = 'red'", "is to be a table with some of start, run, url"),
        ("[a", "a.toml"),
    ],
)
def test_a_bad_file_of_engines_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(EngineError, match=message):
        from_file(path)


def test_the_example_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS", "/peers")
    found = {one.name: one for one in from_file(Path("benchmarks/peers.example.toml"))}
    assert found["vllm"].start.startswith("/peers/vllm/bin/vllm serve /peers/smollm2 ")
    assert (found["transformers"].concurrency, found["openvino-int8"].run.split()[-1]) == (1, "{file}")


def test_engines_are_chosen_by_name(tmp_path: Path) -> None:
    path = tmp_path / "peers.toml"
    path.write_text('[a]\nurl = "http://h:1"\n[b]\nurl = "http://h:2"\n')
    options = parse(["--peers", str(path), "--only", "b", "--quire", "x=--dtype float32"])
    assert [one.name for one in chosen_engines(options)] == ["x", "b"]
    assert "--dtype float32" in chosen_engines(options)[0].start
    with pytest.raises(EngineError, match="--only c: the engines are a, b"):
        chosen_engines(parse(["--peers", str(path), "--only", "c"]))
    with pytest.raises(EngineError, match="two engines have one name"):
        chosen_engines(parse(["--peers", str(path), "--quire", "a="]))


def test_structured() -> None:
    ended = run(
        "benchmarks.structured", "--requests", "3", "--tokens", "8", "--rounds", "1", "--quire", "--worker null"
    )
    assert ended.returncode == 0, ended.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in ended.stdout.splitlines()]
    assert [row[0] for row in rows[2:]] == ["plain", "strings", "records"]
    assert rows[2][2] == "1.00"
    assert all(float(row[1]) > 0 and float(row[2]) > 0 for row in rows[2:])
    assert all(float(row[4]) <= float(row[5]) for row in rows[3:])
