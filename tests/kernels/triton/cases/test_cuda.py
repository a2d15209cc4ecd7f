"""A model's decode steps as CUDA graphs, captured and replayed by the stand-in for torch.cuda, as no GPU can be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from kernels import triton as backend
from kernels.ops import Kernels
from services.worker import model_executor
from services.worker.cuda import Cuda
from services.worker.graphs import GraphedSteps
from services.worker.machine import Cgroup
from tests.services.worker import cuda_stand_in, random_models
from tests.services.worker.cuda_stand_in import CapturableBackend
from tests.services.worker.plans import Driver

if torch.cuda.is_available():
    pytest.skip("there is a GPU: gpu_check.py runs the worker on it", allow_module_level=True)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[cuda_stand_in.Memory]:
    installed = cuda_stand_in.install(monkeypatch)
    kernels = Kernels("triton", CapturableBackend(backend))
    monkeypatch.setattr(model_executor, "_kernels", lambda where, config: kernels)
    monkeypatch.setattr(model_executor, "_device", Cuda)
    yield installed
    triton.knobs.runtime.jit_post_compile_hook = None


def test_tokens_from_replays_are_the_references(tmp_path: Path, memory: cuda_stand_in.Memory) -> None:
    """A batch of three rows takes the graph of four; five rows are too many for any."""
    random_models.save(tmp_path, "qwen3", num_hidden_layers=1, max_position_embeddings=64)
    prompts = random_models.prompts(3, 18, 2, 2, 1)
    options = {"max_num_seqs": 5, "max_num_batched_tokens": 8, "cudagraph_capture_sizes": [2, 4]}
    executor = random_models.executor(tmp_path, **options)
    assert isinstance(executor.decoder.fused, GraphedSteps)
    replayed = []
    run = executor.decoder.fused._graphs.run

    def counting(batch: object) -> torch.Tensor:
        replayed.append(len(batch.tokens))  # type: ignore[attr-defined]
        return run(batch)  # type: ignore[arg-type]

    executor.decoder.fused._graphs.run = counting  # type: ignore[method-assign]
    tokens = [generate(executor, prompts[:count]) for count in (3, 5)]
    assert set(replayed) == {3}
    assert all((layer[0] == 0).all() for layer in executor._runner.kv)

    with pytest.MonkeyPatch.context() as undone:
        undone.setattr(model_executor, "_device", lambda where, config, cgroup: model_executor.Cpu(Cgroup()))
        undone.setattr(model_executor, "_kernels", lambda where, config: model_executor.select(where, "reference"))
        reference = random_models.executor(tmp_path)
    assert tokens == [generate(reference, prompts[:count]) for count in (3, 5)]


def generate(executor: model_executor.ModelExecutor, prompts: list[list[int]]) -> list[list[int]]:
    return Driver(executor).generate(prompts, 3)
