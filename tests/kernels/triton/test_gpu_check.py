"""The GPU benchmark says at once that it needs a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the check would run for minutes")
def test_without_a_gpu() -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "gpu_check.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "gpu_check needs a GPU, and torch.cuda.is_available() is False\n"
    assert done.stdout == ""
