"""The GPU check runs, on small shapes in Triton's interpreter; and says at once when it needs a GPU.

Its server section is the test of the whole pipeline on the Triton kernels: tokens over HTTP are transformers'.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

triton = pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_check.py"


def gpu_check(*argv: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, SCRIPT, *argv], env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.skipif(
    triton.__version__ < "3.7" and numpy.__version__ >= "2.4", reason="triton 3.6's interpreter needs numpy < 2.4"
)
def test_every_section_runs_interpreted() -> None:
    sections = [word for name in ("correctness", "worker", "server", "decode", "steps") for word in ("--section", name)]
    done = gpu_check("--device", "cpu", "--tiny", "--inside", *sections, "--section", "prefill")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert "ok   tokens over HTTP are transformers'" in done.stdout
    assert done.stdout.count("\n  ok  ") > 15
    assert "    decode 2  " in done.stdout  # the table of steps
    assert "floor/ours" in done.stdout


def test_a_section_that_fails_is_told_and_the_next_one_runs(tmp_path: Path) -> None:
    broken = tmp_path / "gpu_check.py"
    text = SCRIPT.read_text().replace("parents[1]", f"parents[0]; ROOT = Path({str(SCRIPT.parents[1])!r})")
    broken.write_text(text.replace("operations = timer.rate()", "raise RuntimeError('a lost device')"))
    done = subprocess.run(
        [sys.executable, broken, "--device", "cpu", "--tiny", "--section", "prefill", "--section", "decode"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "RuntimeError: a lost device" in done.stdout
    assert "memory read" in done.stdout
    assert done.stdout.endswith("FAILED: prefill\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the check would run for minutes")
def test_without_a_gpu() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert done.stderr == "gpu_check needs a GPU, and torch.cuda.is_available() is False\n"
    assert done.stdout == ""
