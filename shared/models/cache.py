"""The folder where fetched and converted models are kept, and how processes share it.

Several processes of a server start at once and all look for the same model. Whatever is made here is made under a lock
and appears under its final name only when whole, so no process ever reads a half-written file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_TIMEOUT = 3600.0
"""Seconds to wait for another process that is downloading or converting the same model."""


def cache_root(download_dir: str = "") -> Path:
    """``download_dir``, else $QUIRE_CACHE, else ``quire`` in the user's cache folder. Made if missing.

    Raises ConfigError when it cannot be made or written.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = Path(download_dir or os.environ.get("QUIRE_CACHE") or os.path.join(base, "quire")).expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the model cache {root}: {error.strerror} (set QUIRE_CACHE)") from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigError(f"the model cache {root} is not writable (set QUIRE_CACHE to a folder that is)")
    return root


@contextmanager
def locked(target: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Holds the lock of ``target`` among all processes. Raises ConfigError naming it after ``timeout`` seconds.

    The kernel drops the lock when its holder dies, so a crash leaves nothing to clean up.
    """
    lock = target.with_name(target.name + ".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout
    with open(lock, "w") as handle:
        waiting = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another process has held {lock} for {timeout:.0f} s") from None
                if not waiting:
                    log.info("waiting for another process that is preparing %s", target)
                    waiting = True
                time.sleep(0.05)
        yield


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path beside ``target`` to write to; on success it becomes ``target`` in one step, else it is removed."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield part
        with open(part, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Like ``new_file`` for a folder; one that is there already, unusable, makes room."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        shutil.rmtree(target, ignore_errors=True)
        os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
