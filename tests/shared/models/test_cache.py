from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.models.cache import cache_root, locked, new_file, new_folder


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / "home" / ".cache" / "quire"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "quire"
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    assert cache_root(str(tmp_path / "flag")) == tmp_path / "flag"


def test_a_lock_held_elsewhere_is_waited_for_and_named(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shared.models.cache import locked\n"
        f"with locked(Path({str(tmp_path / 'thing')!r})):\n    print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(ConfigError, match=r"another process has held .*thing\.lock"),
            locked(tmp_path / "thing", 0.2),
        ):
            pass
        holder.kill()  # the kernel gives the lock back, however the holder ends
        with locked(tmp_path / "thing", 10.0):
            pass
    finally:
        holder.kill()
        holder.communicate(timeout=10)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with pytest.raises(RuntimeError), new_file(target) as part:
        part.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_file(target) as part:
        part.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with pytest.raises(RuntimeError), new_folder(target) as part:
        (part / "a").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(target) as part:
        (part / "a").write_text("whole")
    assert (target / "a").read_text() == "whole"
