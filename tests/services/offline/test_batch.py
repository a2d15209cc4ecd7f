"""``quire run-batch`` as its user runs it, against OpenAI's batch format."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.server import NULL, QUIRE, Server, run, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("batch"), *NULL, "--max-model-len", "512", "--api-key", "secret") as server:
        yield server


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in url else {"prompt": f"hello {custom_id}"}
    fields = {"max_tokens": 4, "temperature": 0, **prompt, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(text: str) -> dict[str | None, dict[str, Any]]:
    records = [json.loads(line) for line in text.splitlines()]
    found = {record["custom_id"]: record for record in records}
    assert len(found) == len(records), "an answer came twice"
    return found


def batch(server: Server | None, source: str | Path, out: str | Path, *argv: str, **options: Any) -> Any:
    target = ("--url", server.url, "--api-key", "secret") if server is not None else (*NULL, "--max-model-len", "512")
    return run("run-batch", "-i", str(source), "-o", str(out), *target, *argv, **options)


def test_answers_have_openais_form_and_say_what_the_server_says(server: Server, tmp_path: Path) -> None:
    lines = [request(f"id-{number}") for number in range(40)] + [request("chat", "/v1/chat/completions", n=2)]
    out = tmp_path / "out.jsonl"
    ended = batch(server, write(tmp_path / "in.jsonl", lines), out, "--max-concurrency", "8")
    assert ended.returncode == 0, ended.stderr
    assert "run-batch: done: 41 answered" in ended.stderr and "0 of them with errors" in ended.stderr
    found = read(out.read_text())
    assert found.keys() == {line["custom_id"] for line in lines}
    for record in found.values():
        assert record.keys() == {"id", "custom_id", "response", "error"} and record["error"] is None
        assert record["response"].keys() == {"status_code", "request_id", "body"}
        assert record["id"].startswith("batch_req_") and record["response"]["request_id"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
        for number in (0, 17):
            asked = client.completions.create(
                model=server_model(client), prompt=f"hello id-{number}", max_tokens=4, temperature=0
            )
            assert found[f"id-{number}"]["response"]["body"]["choices"][0]["text"] == asked.choices[0].text
    chat = openai.types.chat.ChatCompletion.model_validate(found["chat"]["response"]["body"], strict=True)
    assert [choice.index for choice in chat.choices] == [0, 1]


def server_model(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


BAD = [
    ("{", "invalid_json"),
    ("[1]", "invalid_json"),
    ('{"custom_id": 5}', "missing_custom_id"),
    ({**request("method"), "method": "GET"}, "invalid_method"),
    ({**request("url"), "url": "/v1/embeddings"}, "invalid_url"),
    ({**request("body"), "body": "hi"}, "invalid_body"),
    (request("stream", stream=True), "invalid_body"),
]


def test_each_bad_line_has_its_error_and_costs_no_other(server: Server, tmp_path: Path) -> None:
    lines = [line for line, _ in BAD]
    lines += [request("refused", temperature=9), request("long", max_tokens=5000), request("fine"), "", request("fine")]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    ended = batch(server, source, out)
    assert ended.returncode == 3, ended.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    by_message = {record["error"]["message"].split(":")[0]: record for record in records if record["error"]}
    for number, (_, code) in enumerate(BAD, 1):
        assert (
            by_message[f"line {number}"]["error"]["code"] == code and by_message[f"line {number}"]["response"] is None
        )
    assert by_message["line 12"]["error"]["code"] == "duplicate_custom_id"
    answered = {record["custom_id"]: record["response"] for record in records if record["response"]}
    assert answered["refused"]["status_code"] == 400
    assert answered["refused"]["body"]["error"]["param"] == "temperature"
    assert "maximum context length is 512" in answered["long"]["body"]["error"]["message"]
    assert answered["fine"]["status_code"] == 200 and len(records) == 11
    # Nothing of it comes again, and errors of lines without an id are not told twice.
    before = out.read_bytes()
    again = batch(server, source, out)
    assert out.read_bytes() == before and "0 answered" in again.stderr and again.returncode == 0


def test_lines_that_cannot_be_sent_have_their_errors(server: Server, tmp_path: Path) -> None:
    deep = "[" * 400 + "]" * 400
    lines = [
        json.dumps(request("deep"))[:-2] + f', "extra": {deep}}}}}',
        json.dumps({**request("url"), "url": "DEEP"}).replace('"DEEP"', "[" * 1000 + "]" * 1000),
        request("surrogate", prompt="half \ud800"),
        request("fine"),
    ]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    ended = batch(server, source, out)
    assert ended.returncode == 3 and "Traceback" not in ended.stderr, ended.stderr
    found = read(out.read_text())
    assert found["fine"]["response"]["status_code"] == 200
    assert found["deep"]["response"] is None and found["deep"]["error"]["code"] == "invalid_body"
    assert found["deep"]["error"]["message"].startswith("line 1: body.extra: cannot be sent as JSON")
    assert found["url"]["error"] == {
        "code": "invalid_url",
        "message": "line 2: url is a list, not one of /v1/chat/completions, /v1/completions, /v1/responses",
    }
    assert found[None]["error"]["code"] == "invalid_json"
    before = out.read_bytes()
    assert batch(server, source, out).returncode == 0 and out.read_bytes() == before


def test_stdin_to_stdout_on_a_server_of_its_own() -> None:
    """No port is opened, nothing but answers is on stdout, and nothing is left afterwards."""
    text = "".join(json.dumps(request(f"id-{number}")) + "\n" for number in range(5))
    process = subprocess.run(
        [*QUIRE, "run-batch", "-i", "-", "-o", "-", *NULL, "--max-model-len", "512"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    assert len(read(process.stdout)) == 5
    assert "Traceback" not in process.stderr


def test_a_killed_run_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    lines = [request(f"id-{number}", max_tokens=60) for number in range(300)]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    argv = ["run-batch", "-i", str(source), "-o", str(out), "--url", server.url, "--max-concurrency", "4"]
    with subprocess.Popen(
        [*QUIRE, *argv], env={**os.environ, "QUIRE_API_KEY": "secret"}, stderr=subprocess.DEVNULL
    ) as killed:
        deadline = time.monotonic() + 30
        while not (out.exists() and out.read_bytes().count(b"\n") > 20):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    before = out.read_bytes()
    assert before.count(b"\n") < 300
    out.write_bytes(before + b'{"id":"batch_req_x","custom_id":"id-2')
    ended = batch(server, source, out)
    assert ended.returncode == 0, ended.stderr
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert len(read(out.read_text())) == 300


def test_a_line_is_asked_after_its_duplicate_was_refused(server: Server, tmp_path: Path) -> None:
    """As where a run was killed in between; and the other way round, and nothing comes twice."""
    source, out = write(tmp_path / "in.jsonl", [request("a"), request("a")]), tmp_path / "out.jsonl"
    assert batch(server, source, out).returncode == 3
    lines = sorted(out.read_text().splitlines(), key=lambda line: json.loads(line)["error"] is None)
    for kept in lines:
        out.write_text(kept + "\n")
        again = batch(server, source, out)
        assert "1 answered" in again.stderr and "1 were there before" in again.stderr
        records = sorted(map(json.loads, out.read_text().splitlines()), key=lambda one: one["error"] is None)
        assert [one["error"] and one["error"]["code"] for one in records] == ["duplicate_custom_id", None]
        assert records[1]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-o", "x"], "--input-file is missing"),
        (["-i", "no-such-file", "-o", "x"], "--input-file no-such-file: No such file or directory"),
        (["-i", os.devnull, "-o", os.devnull + "/x"], "--output-file"),
        (
            ["-i", os.devnull, "-o", "-", "--url", "http://x", "--dtype", "float32"],
            "--dtype=float32: an option of a server",
        ),
        (
            ["-i", os.devnull, "-o", "-", "--worker", "null", "--max-num-seqs", "0"],
            "--max-num-seqs is 0, below its min",
        ),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str) -> None:
    ended = run("run-batch", *argv)
    assert ended.returncode == 2 and message in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_server_that_is_not_there_ends_the_run(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request("a")])
    argv = ("-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", "http://127.0.0.1:9")
    ended = run("run-batch", *argv, env={"QUIRE_MAX_NUM_SEQS": "8"})  # which says nothing about that server
    assert ended.returncode == 1 and "ended early: no answer from http://127.0.0.1:9" in ended.stderr
    assert "Traceback" not in ended.stderr
