"""Every test here runs on each build of the kernels that this processor can run."""

from __future__ import annotations

import pytest

from kernels.cpu import build
from kernels.cpu.kernels import CpuKernels
from kernels.cpu.library import Library
from kernels.errors import UnavailableError


@pytest.fixture(scope="session", params=[isa.name for isa in build.supported()])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    isa = next(isa for isa in build.ISAS if isa.name == request.param)
    try:
        return CpuKernels(Library(build.library(isa)))
    except UnavailableError as error:
        pytest.skip(str(error))
