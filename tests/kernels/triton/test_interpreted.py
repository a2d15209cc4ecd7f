"""Runs the tests of Triton's kernels in its interpreter: those that all implementations share, and their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

triton = pytest.importorskip("triton")
NUMPY_WARNING = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"  # triton 3.6's interpreter, see below
KERNELS = Path(__file__).parents[1]
TESTS = [KERNELS / "test_attention.py", KERNELS / "test_fused.py", KERNELS / "test_memory.py", KERNELS / "triton/cases"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    triton.__version__ < "3.7" and numpy.__version__ >= "2.4",
    reason="triton 3.6's interpreter turns one-element arrays into numbers, which numpy 2.4 refuses",
)
def test_kernels_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", NUMPY_WARNING, *map(str, TESTS)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=KERNELS.parents[1],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
