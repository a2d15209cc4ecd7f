"""The output file of a batch: answers are appended as they come, and a later run goes on where one ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from shared.errors import ConfigError

DUPLICATE = "duplicate_custom_id"  # error code of a line whose id is another line's


class BatchOutput:
    """answered: custom_ids that have their answer. refused: what was said about lines without an id of their own."""

    def __init__(self, file: BinaryIO, answered: set[str], refused: set[str]) -> None:
        self._file = file
        self.answered, self.refused = answered, refused

    @classmethod
    def open(cls, path: str) -> BatchOutput:
        """``path``, or stdout for "-". What an earlier run could not finish is taken out, to be asked again:

        a last line that was cut off, and answers of a server that was too busy or failed. Raises ConfigError for a file
        that is not a batch's output, or that another run is writing.
        """
        if path == "-":
            return cls(sys.stdout.buffer, set(), set())
        file = _locked(path)
        try:
            kept, answered, refused, unfinished = _read(file, path)
            if unfinished:
                # In one step, so that a crash in the middle loses nothing.
                beside = Path(f"{path}.part")
                beside.write_bytes(b"".join(kept))
                beside.replace(path)
                file.close()
                file = _locked(path)
        except BaseException:
            file.close()
            raise
        file.seek(0, os.SEEK_END)
        return cls(file, answered, refused)

    def append(self, record: dict[str, Any]) -> None:
        """Raises OSError when it cannot be written."""
        self._file.write(orjson.dumps(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout.buffer:
            with contextlib.suppress(OSError):  # a full disk was told at the write
                os.fsync(self._file.fileno())
            self._file.close()


def _locked(path: str) -> BinaryIO:
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
    except OSError as error:
        raise ConfigError(f"--output-file {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(f"--output-file {path}: another run-batch is writing it") from None
    return file


def _read(file: BinaryIO, path: str) -> tuple[list[bytes], set[str], set[str], bool]:
    """Lines that stay, what they answer and refuse, and whether others were there."""
    kept, answered, refused, unfinished = [], set[str](), set[str](), False
    for number, raw in enumerate(file.read().splitlines(keepends=True), 1):
        if not raw.endswith(b"\n"):
            unfinished = True
            continue
        try:
            record = orjson.loads(raw)
            custom_id, response, error = record["custom_id"], record["response"], record["error"]
            again = response is not None and _is_passing(response["status_code"])
            is_own = custom_id is not None and (error is None or error["code"] != DUPLICATE)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(f"--output-file {path}: line {number} is not the answer of a batch") from None
        if again:
            unfinished = True
            continue
        kept.append(raw)
        if is_own:
            answered.add(custom_id)
        else:
            refused.add(error["message"])
    return kept, answered, refused, unfinished


def _is_passing(status: int) -> bool:
    """Whether the same request may do better another time."""
    return status == 429 or status >= 500
