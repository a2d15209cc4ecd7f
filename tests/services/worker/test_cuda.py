"""The CUDA device's own logic on a stand-in for torch.cuda, as no GPU can be had: what waits for what, and who gets
which memory. That the calls do on a GPU what the stand-in takes them for, only a GPU can show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import reference
from services.worker import model_executor
from services.worker.config import WorkerConfig
from services.worker.cuda import Cuda, Usage
from services.worker.machine import Cgroup
from services.worker.model_executor import ModelExecutor
from shared.errors import ConfigError
from shared.sampling import LogitRules
from shared.wire import RowRules
from tests.services.worker import cuda_stand_in, random_models
from tests.services.worker.cuda_stand_in import GIB, WatchedKernels
from tests.services.worker.plans import new_row, plan

MIB = 1 << 20
BLOCK = 16 * 768  # bytes of a block of the model: 16 tokens of 3 layers, 2 heads of 16 float32s, keys and values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_models.save(path, "llama")
    return path


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> cuda_stand_in.Memory:
    memory = cuda_stand_in.install(monkeypatch)
    kernels = WatchedKernels("reference", reference)
    monkeypatch.setattr(model_executor, "_kernels", lambda where, config: kernels)
    monkeypatch.setattr(model_executor, "_device", Cuda)
    return memory


def on_stand_in(folder: Path, **options: Any) -> tuple[ModelExecutor, WatchedKernels]:
    executor = random_models.executor(folder, max_num_batched_tokens=64, **options)
    kernels = executor.decoder.kernels
    assert isinstance(kernels, WatchedKernels)
    kernels.accesses.clear()  # of the trial
    return executor, kernels


def swapping(prompt: list[int], other: list[int]) -> list[dict[str, Any]]:
    """Plans: two rows, of which the first is swapped out, comes back in other blocks, and forks by a copy."""
    entry = {"table_slots": [0], "table_lens": [2], "chunk_slots": [0], "chunk_samples": [[0]]}
    both = {
        "full": True,
        "new_rows": [new_row(0), new_row(1)],
        "table_slots": [0, 1],
        "table_lens": [2, 2],
        "table_blocks": [11, 12, 13, 14],
        "chunk_slots": [0, 1],
        "chunk_starts": [0, 0],
        "chunk_lens": [20, 20],
        "chunk_samples": [[0], [1]],
        "tokens": [*prompt, *other],
    }
    back = {"swap_in": [1, 30, 0, 29], "table_blocks": [30, 29], "chunk_starts": [21], "chunk_lens": [1]}
    fork = {"copies": [29, 31, 14, 15], "table_slots": [0, 1], "table_lens": [2, 2], "table_blocks": [30, 31, 13, 15]}
    return [
        both,
        {"decodes": 2},
        {"decodes": 1, "release": [0], "swap_out": [11, 1, 12, 0]},
        {"decodes": 1, "new_rows": [new_row(0, length=21)], "tokens": [0], **back, **entry},
        {"decodes": 2, **fork},
        {"decodes": 2},
    ]


def outputs(executor: ModelExecutor, plans: list[dict[str, Any]], ahead: int) -> list[list[int]]:
    """Ids of each step, when up to ``ahead`` further steps are launched before its output is looked at. The row that
    comes back is told the token it had."""
    found: list[list[int]] = []
    running = []
    for number, changes in enumerate(plans):
        if "swap_in" in changes:
            while running:
                found.append(running.pop(0).output().ids.tolist())
            changes = {**changes, "tokens": [found[1][0]]}
        running.append(executor.launch(plan(step_id=number + 1, **changes)))
        if len(running) > ahead:
            found.append(running.pop(0).output().ids.tolist())
    return found + [step.output().ids.tolist() for step in running]


def test_tokens_are_the_cpus_and_no_two_operations_race(folder: Path, memory: cuda_stand_in.Memory) -> None:
    """vllm-ascend #14055: a sequence preempted while a later step is in flight keeps its blocks and its token."""
    prompts = random_models.prompts(20, 20)
    with pytest.MonkeyPatch.context() as undone:
        undone.setattr(model_executor, "_device", lambda where, config, cgroup: model_executor.Cpu(cgroup))
        expected = outputs(random_models.executor(folder, swap_space=2 * BLOCK), swapping(*prompts), 0)
    executor, kernels = on_stand_in(folder, swap_space=2 * BLOCK)
    assert outputs(executor, swapping(*prompts), 1) == expected
    assert {access.name for access in kernels.accesses} == {"store", "decode", "prefill", "copy", "swap_out", "swap_in"}
    beside = {access.name for access in kernels.accesses if access.stream is not cuda_stand_in.MAIN}
    assert beside == {"swap_out", "swap_in"}
    assert kernels.races() == []


def begins_at_once(self: Cuda, work: Callable[[], None]) -> Any:
    with cuda_stand_in.on(cuda_stand_in.Stream()):
        work()
        return self.mark(), self.mark()


@pytest.mark.parametrize(
    ("method", "broken", "race"),
    [
        ("follow", lambda self, mark: None, ("swap_in", "prefill")),
        ("aside", begins_at_once, ("store", "swap_out")),
    ],
)
def test_a_missing_wait_is_a_race(
    folder: Path, memory: cuda_stand_in.Memory, monkeypatch: pytest.MonkeyPatch, method: str, broken: Any, race: Any
) -> None:
    """What the test above looks for, it finds."""
    executor, kernels = on_stand_in(folder, swap_space=2 * BLOCK)
    monkeypatch.setattr(Cuda, method, broken)
    outputs(executor, swapping(*random_models.prompts(20, 20)), 1)
    assert race in kernels.races()


def test_a_step_is_over_only_when_its_swaps_are(folder: Path, memory: cuda_stand_in.Memory) -> None:
    executor, kernels = on_stand_in(folder, swap_space=2 * BLOCK)
    for number, changes in enumerate(swapping(*random_models.prompts(20, 20))):
        kernels.accesses.clear()
        step = executor.launch(plan(step_id=number + 1, **changes))
        waited: set[int] = set()
        for mark in step._ends():
            waited |= {id(access) for access in kernels.accesses if access.before(mark.event.clock)}
        assert waited == {id(access) for access in kernels.accesses} != set()


def test_rules_know_the_token_of_a_step_that_is_not_looked_at_yet(folder: Path, memory: cuda_stand_in.Memory) -> None:
    """A repetition penalty so high that no token comes twice, with every step launched before the last one's output."""
    prompt = random_models.prompts(5)[0]
    rules = RowRules(5, prompt, [], LogitRules(repetition_penalty=1e9))
    entry = {
        "full": True,
        "new_rows": [replace(new_row(0), rules=rules)],
        "table_slots": [0],
        "table_lens": [2],
        "table_blocks": [3, 4],
        "chunk_slots": [0],
        "chunk_starts": [0],
        "chunk_lens": [5],
        "chunk_samples": [[0]],
        "tokens": prompt,
    }
    executor, _ = on_stand_in(folder)
    ids = [i for (i,) in outputs(executor, [entry, *[{"decodes": 1}] * 12], 1)]
    assert len({*ids, *prompt}) == 13 + len(set(prompt))


def test_kv_gets_what_the_largest_step_and_others_leave(folder: Path, memory: cuda_stand_in.Memory) -> None:
    executor, _ = on_stand_in(folder, num_gpu_blocks_override=None, max_num_seqs=1, max_model_len=64)
    assert executor.memory.num_blocks == 5  # four hold all that one sequence may have, and there is room
    usage = Usage(total=10 * GIB, others=GIB, peak=4 * GIB, graphs=72 * MIB)
    assert usage.left(0.92) == int(10 * GIB * 0.92) - 5 * GIB - 72 * MIB
    with pytest.raises(
        ConfigError, match=rf"--gpu-memory-utilization 0.5 leaves no memory for KV: of {10 * GIB} bytes"
    ):
        on_stand_in(folder, num_gpu_blocks_override=None, gpu_memory_utilization=0.5)
    # 0.50001 of 10 GiB: 107374 bytes are left, in which 8 blocks fit
    executor, _ = on_stand_in(folder, num_gpu_blocks_override=None, gpu_memory_utilization=0.50001)
    assert executor.memory.num_blocks == int(10 * GIB * 0.00001) // BLOCK == 8


def test_a_largest_step_without_memory_says_what_to_change(
    folder: Path, memory: cuda_stand_in.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(WatchedKernels, "sample", out_of_memory)
    with pytest.raises(ConfigError, match="no memory for the largest step, of --max-num-batched-tokens 64 tokens in"):
        on_stand_in(folder)


def test_swap_space_is_pinned_where_it_lies(folder: Path, memory: cuda_stand_in.Memory) -> None:
    executor, _ = on_stand_in(folder, swap_space=5 * BLOCK)
    assert executor.memory.host_blocks == 5
    assert list(memory.registered.values()) == [5 * BLOCK // 3] * 3
    with pytest.raises(ConfigError, match=r"--swap-space: its blocks take \d+ bytes, but \d+ bytes of memory are free"):
        Cuda(torch.device("cpu"), WorkerConfig(), Cgroup()).check_room(0, 1 << 60)
