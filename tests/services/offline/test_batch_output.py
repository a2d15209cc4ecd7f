"""A batch's output file over several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.offline.batch_output import BatchOutput
from shared.errors import ConfigError


def record(custom_id: str | None, status: int | None, error: str = "") -> dict[str, Any]:
    response = None if status is None else {"status_code": status, "request_id": "r", "body": {}}
    said = {"code": "invalid_json", "message": error} if error else None
    return {"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": said}


def ids(path: Path) -> list[str | None]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def append(path: Path, *records: dict[str, Any]) -> BatchOutput:
    output = BatchOutput.open(str(path))
    for one in records:
        output.append(one)
    output.close()
    return output


def test_answers_are_kept_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    append(path, record("a", 200), record("b", 400), record(None, None, "line 3: not valid JSON"))
    again = append(path, record("c", 200))
    assert again.answered == {"a", "b"} and again.refused == {"line 3: not valid JSON"}
    assert ids(path) == ["a", "b", None, "c"]


def test_an_error_of_another_line_of_the_same_id_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    duplicate = record("a", None, "line 2: custom_id 'a' is that of a line before")
    duplicate["error"]["code"] = "duplicate_custom_id"
    append(path, duplicate, record("b", None, "line 3: url is 'x'"))
    again = append(path)
    assert again.answered == {"b"} and again.refused == {duplicate["error"]["message"]}


@pytest.mark.parametrize("torn", ['{"id": "batch_req_2", "custom_id": "b", "resp', "{"])
def test_a_last_line_that_was_cut_off_is_asked_again(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "out.jsonl"
    append(path, record("a", 200))
    with path.open("a") as file:
        file.write(torn)
    assert append(path, record("b", 200)).answered == {"a"}
    assert ids(path) == ["a", "b"] and path.read_bytes().endswith(b"\n")
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_the_server_could_not_do_is_asked_again(tmp_path: Path, status: int) -> None:
    path = tmp_path / "out.jsonl"
    append(path, record("a", 200), record("b", status), record("c", 404))
    assert append(path).answered == {"a", "c"}
    assert ids(path) == ["a", "c"]


def test_another_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for text in ("dear diary\n", '{"custom_id": "a"}\n', '[1, 2]\n{"cut'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"notes.txt: line 1 is not the answer of a batch"):
            BatchOutput.open(str(path))
        assert path.read_text() == text


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"torn')  # so that the file is replaced, and the new one locked
    output = BatchOutput.open(str(path))
    with pytest.raises(ConfigError, match=r"out.jsonl: another run-batch is writing it"):
        BatchOutput.open(str(path))
    output.close()
    BatchOutput.open(str(path)).close()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output-file .*none/out.jsonl: No such file or directory"):
        BatchOutput.open(str(tmp_path / "none" / "out.jsonl"))
