"""Every test here runs on each build of the kernels that this processor can run."""

from __future__ import annotations

import os
import shutil

import pytest

from kernels.cpu import build
from kernels.cpu.kernels import CpuKernels
from kernels.cpu.library import Library


@pytest.fixture(scope="session", params=[isa.name for isa in build.supported()])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    isa = next(isa for isa in build.ISAS if isa.name == request.param)
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no compiler")
    return CpuKernels(Library(build.library(isa)))
