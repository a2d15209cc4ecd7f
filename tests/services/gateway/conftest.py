from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.services.gateway.pipeline import Gateway, Pipeline, running


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with running() as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def gateway(pipeline: Pipeline) -> Gateway:
    return pipeline.gateway("--served-model-name=toy", "--served-model-name=alias/toy")


@pytest.fixture
def client(gateway: Gateway) -> Iterator[httpx.Client]:
    with gateway.client() as client:
        yield client
