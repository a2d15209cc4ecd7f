"""A seeded request says the same alone, among fifty others, and after it lost its memory and came back."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.executor import Executor
from services.worker.model_executor import ModelExecutor
from shared.sampling import LogitRules
from tests.services.scheduler.simulation import Simulation
from tests.services.worker import random_models

VOCAB, BLOCKS, ROWS, TOKENS = 320, 400, 64, 24
SEEDED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.0, "rules": LogitRules(presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.2)},
    {"temperature": 0.9, "rules": LogitRules(typical_p=0.8)},
    {"temperature": 1.0, "rules": LogitRules(logit_bias_ids=[9, 11], logit_bias=[3.0, -3.0]), "n": 2},
]
PROMPTS = random_models.prompts(40, 17, 33, 8, 25, 60)
OTHERS = random_models.prompts(*(5 + number % 30 for number in range(50)))


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> ModelExecutor:
    folder = tmp_path_factory.mktemp("model")
    random_models.save(folder, "llama")
    return random_models.executor(folder, max_num_seqs=ROWS, num_gpu_blocks_override=BLOCKS, swap_space=64 << 20)


class OnModel(Simulation):
    def __init__(self, executor: ModelExecutor, num_blocks: int, **policy: Any) -> None:
        self._model = executor
        super().__init__(
            num_blocks=num_blocks,
            max_num_seqs=ROWS,
            max_num_batched_tokens=256,
            max_model_len=256,
            vocab_size=VOCAB,
            host_blocks=executor.memory.host_blocks,
            **policy,
        )

    def new_executor(self) -> Executor:
        return self._model


def outputs(simulation: OnModel) -> list[list[int]]:
    return [ids for (rid, _), ids in sorted(simulation.outputs.items()) if rid <= len(SEEDED)]


def seeded(simulation: OnModel, rid: int) -> None:
    simulation.submit(rid, PROMPTS[rid - 1], TOKENS, ignore_eos=True, seed=1000 * rid, **SEEDED[rid - 1])


@pytest.fixture(scope="module")
def alone(executor: ModelExecutor) -> list[list[int]]:
    found = []
    for rid in range(1, len(SEEDED) + 1):
        simulation = OnModel(executor, BLOCKS)
        seeded(simulation, rid)
        simulation.drain()
        found += outputs(simulation)
    assert len({tuple(ids) for ids in found}) == len(found) == len(SEEDED) + 1
    return found


@pytest.mark.parametrize(("num_blocks", "mode"), [(BLOCKS, "recompute"), (70, "recompute"), (70, "swap")])
def test_among_fifty_others(executor: ModelExecutor, alone: list[list[int]], num_blocks: int, mode: str) -> None:
    """vLLM 51226: a neighbour without a seed changed what a seeded request said. Here fifty come before and between."""
    simulation = OnModel(executor, num_blocks, preemption_mode=mode)
    for number, prompt in enumerate(OTHERS):
        simulation.submit(100 + number, prompt, 30, ignore_eos=True, temperature=1.0, seed=7 * number + 1)
        if number >= 44:  # the newest lose their memory first
            seeded(simulation, number - 43)
        simulation.round()
    simulation.drain()
    assert outputs(simulation) == alone
    if num_blocks < BLOCKS:
        preempted = [simulation.done[rid].preemptions for rid in range(1, len(SEEDED) + 1)]
        assert simulation.scheduler.preemption.counts[mode] > 0 and max(preempted) > 0, preempted
