from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from services.launcher.rundir import LOCK, RunDir

DIE = """
import os, sys
from pathlib import Path
from services.launcher.rundir import RunDir
print(RunDir(Path(sys.argv[1])).path, flush=True)
os._exit(0)
"""


def test_it_is_private_and_goes_away(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    assert stat.S_IMODE(rundir.path.stat().st_mode) == 0o700
    rundir.close()
    assert not rundir.path.exists()


def test_only_dead_launches_are_swept(tmp_path: Path) -> None:
    living = RunDir(tmp_path)
    died = Path(subprocess.run([sys.executable, "-c", DIE, tmp_path], stdout=-1, text=True, check=True).stdout.strip())
    (died / "clients").touch()
    other = tmp_path / "quire-of-somebody-else"
    other.mkdir()  # no lock file: not one of ours, or one that is being made
    assert died.exists()
    newest = RunDir(tmp_path)
    assert not died.exists()
    assert (living.path / LOCK).exists()
    assert other.exists()
    newest.close()
    living.close()
