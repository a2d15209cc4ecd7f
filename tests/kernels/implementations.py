"""The implementations of ``kernels.ops`` that this process can run.

The reference, and every build of the CPU kernels that this processor has the instructions for; Triton's kernels where
there is a GPU, or in Triton's interpreter: a process either interprets kernels or compiles them, so
``triton/test_interpreted.py`` starts one, with the same tests.
"""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from kernels.cpu import build
from kernels.cpu.kernels import CpuKernels
from kernels.cpu.library import Library
from kernels.ops import Kernels, select

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = [isa.name for isa in build.supported()]


def names() -> list[str]:
    if INTERPRETED:
        return ["triton"]
    return ["reference", *NATIVE, *(["triton"] if torch.cuda.is_available() else [])]


def implementation(name: str) -> Kernels:
    return Kernels(name, native(name)) if name in NATIVE else select(device_of(name), name)


def device_of(name: str) -> torch.device:
    return torch.device("cuda" if name == "triton" and not INTERPRETED else "cpu")


def native(name: str) -> CpuKernels:
    """The CPU kernels for one instruction set; skips the test where they cannot be compiled."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no compiler")
    return CpuKernels(Library(build.library(next(isa for isa in build.ISAS if isa.name == name))))
