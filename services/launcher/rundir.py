"""The private directory that holds one launch's ipc sockets, and the sweeping of those that a killed one left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "quire-"
LOCK = "launcher.lock"


class RunDir:
    """A new directory of mode 0700, held by a file lock for as long as this object lives."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(parent: Path) -> None:
    """Removes directories of this user's launchers that no longer live (nobody holds their lock)."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not ours, or just being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
