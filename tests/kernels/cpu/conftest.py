"""Every test here runs on each build of the kernels that this processor can run."""

from __future__ import annotations

import pytest

from kernels.cpu.kernels import CpuKernels
from tests.kernels.implementations import NATIVE, native


@pytest.fixture(scope="session", params=NATIVE)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return native(request.param)
