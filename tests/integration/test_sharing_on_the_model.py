"""The scheduler's sharing on the built-in model in fp32: the same ids, whatever was cached, shared or chunked.

That a cold run gives transformers' ids is tested in ``test_real_model``; here everything else is held to a cold run.
"""

from __future__ import annotations

import random

import pytest

from services.worker.config import WorkerConfig
from services.worker.executor import Executor
from services.worker.model_executor import ModelExecutor
from tests.services.scheduler.simulation import Simulation

VOCAB = 49_152
BLOCKS = 200


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, VOCAB) for _ in range(count)]


@pytest.fixture(scope="module")
def executor() -> ModelExecutor:
    return ModelExecutor(
        WorkerConfig(dtype="float32", max_model_len=1024, num_gpu_blocks_override=BLOCKS, max_num_seqs=8)
    )


class OnModel(Simulation):
    """The pure scheduler with the model for a worker. A new one starts with a full plan, so the rows are its own."""

    def __init__(self, executor: ModelExecutor, *, max_num_batched_tokens: int = 256, caching: bool = True) -> None:
        self._model = executor
        super().__init__(
            num_blocks=BLOCKS,
            max_model_len=1024,
            vocab_size=VOCAB,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=caching,
        )

    def new_executor(self) -> Executor:
        return self._model

    def ids(self, rid: int, prompt: list[int]) -> list[int]:
        self.submit(rid, prompt, 12, ignore_eos=True)
        self.drain()
        return self.outputs[rid, 0]


def test_greedy_ids_are_the_same_cold_warm_partly_inside_a_block_wholly_cached_and_chunked(
    executor: ModelExecutor,
) -> None:
    prompt = tokens(64)
    others = {
        "partly": prompt[:32] + tokens(20, 1),
        "inside a block": prompt[:41] + tokens(20, 2),
        "longer": [*prompt, 7],
    }
    cold = {name: OnModel(executor, caching=False).ids(1, other) for name, other in others.items()}
    whole = OnModel(executor, caching=False).ids(1, prompt)
    assert OnModel(executor, max_num_batched_tokens=16).ids(1, prompt) == whole

    simulation = OnModel(executor)
    assert simulation.ids(1, prompt) == whole
    cached = []
    for rid, (name, other) in enumerate(others.items(), 2):
        assert simulation.ids(rid, other) == cold[name], name
        cached.append(simulation.done[rid].cached_tokens)
    assert simulation.ids(9, prompt) == whole  # wholly cached
    assert [*cached, simulation.done[9].cached_tokens] == [32, 41, 64, 63]
    simulation.check_nothing_is_left()


def test_four_samples_equal_four_requests_with_seeds_in_order_and_disturb_nobody(executor: ModelExecutor) -> None:
    prompt = tokens(21, 3)
    alone = []
    for index in range(4):
        single = OnModel(executor, caching=False)
        single.submit(1, prompt, 12, temperature=1.0, seed=40 + index, ignore_eos=True)
        single.drain()
        alone.append(single.outputs[1, 0])
    assert len({tuple(ids) for ids in alone}) == 4
    greedy = OnModel(executor, caching=False).ids(1, tokens(30, 4))

    together = OnModel(executor)
    together.submit(1, tokens(30, 4), 12, ignore_eos=True)
    together.submit(2, prompt, 12, n=4, temperature=1.0, seed=40, ignore_eos=True)
    together.submit(3, prompt, 12, temperature=1.0, seed=42, ignore_eos=True)
    together.drain()
    assert together.outputs[1, 0] == greedy
    assert [together.outputs[2, index] for index in range(4)] == alone
    assert together.outputs[3, 0] == alone[2]
    together.check_nothing_is_left()
