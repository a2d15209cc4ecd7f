"""A test that takes ``ops`` runs on each implementation that this process can run."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import Kernels
from tests.kernels.implementations import device_of, implementation, names


@pytest.fixture(scope="session", params=names())
def ops(request: pytest.FixtureRequest) -> Kernels:
    return implementation(request.param)


@pytest.fixture(scope="session")
def device(ops: Kernels) -> torch.device:
    """Where ``ops`` wants its tensors."""
    return device_of(ops.name)
