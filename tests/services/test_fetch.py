from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.shared.models.build import tiny


def quire_fetch(*args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "fetch", *args],
        env={**os.environ, "QUIRE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_fetch_converts_and_tells_where(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    done = quire_fetch(str(path), "--dtype", "float32", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    folder = Path(lines[1].split()[1])
    assert lines[0].startswith(f"{path} (") and folder.is_relative_to(tmp_path / "cache")
    assert lines[2] == f"  weights  {path} ({path.stat().st_size / 1e6:.1f} MB)"
    assert (folder / "dequantized-f32.safetensors").is_file()
    assert "converting weights: 100%" in done.stderr


def test_a_model_that_cannot_be_had_is_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    done = quire_fetch(str(tmp_path / "m.gguf"), cache=tmp_path / "cache")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"quire fetch: {tmp_path / 'm.gguf'} is not a GGUF file: it has only 4 bytes\n"
