"""The executor as the worker uses it: what it offers, what it refuses to start with, and steps through plans."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.executor import PlanError
from services.worker.model_executor import ModelExecutor
from shared.errors import ConfigError
from shared.models import locate
from shared.sampling import SamplingParams
from tests.services.worker import random_models
from tests.services.worker.plans import GREEDY, Driver, new_row, plan, two_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_models.save(path, "llama", eos_token_id=[5, 6])
    return path


@pytest.fixture(scope="module")
def executor(folder: Path) -> ModelExecutor:
    return random_models.executor(folder)


def test_memory_is_what_the_model_says(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        memory = random_models.executor(folder).memory
    # 3 layers of keys and values, 2 heads of 16 float32s: 768 bytes a token
    assert (memory.num_blocks, memory.host_blocks, memory.block_size) == (160, 0, 16)
    assert memory.bytes_per_block == 16 * 768
    assert (memory.max_model_len, memory.vocab_size, memory.eos_ids) == (256, 320, [5, 6])
    files = locate(str(folder))
    assert (memory.model_digest, memory.model_name, memory.dtype) == (files.digest, str(folder), "float32")
    # 159 blocks beside the padding; 256 tokens take 16
    assert "KV: float32, 768 bytes per token, 160 blocks of 16, 9.9 requests of 256 tokens fit" in caplog.text


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"kv_cache_memory_bytes": 768 * 16 * 10 + 5}, 10),
        ({"kv_cache_memory_bytes": 768 * 16 * 2}, 2),
        ({"kv_cache_memory_bytes": 1 << 40}, 8 * 16 + 1),  # no more than 8 sequences of 256 tokens can use
        ({"kv_cache_memory_bytes": 1 << 40, "max_model_len": 17, "max_num_seqs": 3}, 3 * 2 + 1),
        ({"kv_cache_memory_bytes": 768 * 32 * 4, "block_size": 32}, 4),
        ({"kv_cache_memory_bytes": 384 * 16 * 4, "dtype": "bfloat16"}, 4),
        ({"kv_cache_memory_bytes": 240 * 16 * 4, "kv_cache_dtype": "int8"}, 4),  # 3 x 2 x 2 rows of 16 + 4 bytes
        ({}, 8 * 16 + 1),  # a small model's share of memory holds all that its sequences can use
    ],
)
def test_number_of_blocks(folder: Path, options: dict[str, Any], blocks: int) -> None:
    assert random_models.executor(folder, num_gpu_blocks_override=None, **options).memory.num_blocks == blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 768 * 16 * 2 - 1},
            r"no memory for KV: a block of 16 tokens takes 12288 bytes, two are needed .* there are 24575 bytes",
        ),
        ({"max_model_len": 257}, "--max-model-len 257 is above the model's limit of 256 tokens"),
        (
            {"quantization": "gguf"},
            "--quantization gguf: .* is no GGUF file; int8 and int4 round any model",
        ),
        ({"num_gpu_blocks_override": 1 << 36}, r"the KV blocks asked for take 844424930131968 bytes, but \d+ bytes"),
    ],
)
def test_what_cannot_start_is_one_clear_line(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        random_models.executor(folder, **options)
    assert "\n" not in str(caught.value)


def test_a_wrong_plan_leaves_the_executor_able_to_go_on(folder: Path, executor: ModelExecutor) -> None:
    first = {
        "full": True,
        "new_rows": [new_row(2)],
        "table_slots": [2],
        "table_lens": [1],
        "table_blocks": [9],
        "chunk_slots": [2],
        "chunk_starts": [0],
        "chunk_lens": [3],
        "chunk_samples": [[2]],
        "tokens": [4, 5, 6],
    }
    output = executor.execute(plan(**first))
    with pytest.raises(PlanError, match="counts 2 decoding rows; there are 1"):
        executor.execute(plan(step_id=2, decodes=2))
    second = executor.execute(plan(step_id=2, decodes=1))
    expected = Driver(random_models.executor(folder)).generate([[4, 5, 6]], 2)[0]
    assert [*output.ids.tolist(), *second.ids.tolist()] == expected
    assert (second.slots.tolist(), second.slots.dtype, second.ids.dtype) == ([2], "int32", "int32")
    assert second.timings.keys() >= {"forward", "sample", "total"}


def test_a_plan_without_tokens_samples_nothing(executor: ModelExecutor) -> None:
    output = executor.execute(plan(full=True))
    assert (output.slots.tolist(), output.ids.tolist()) == ([], [])


def test_a_copied_block_continues_like_the_original(executor: ModelExecutor) -> None:
    prompt = random_models.prompts(20)[0]
    expected = Driver(executor).generate([prompt], 5)[0]
    # one prompt, sampled into two rows that share its first block; the second row's last block is copied before its
    # first store, so both write to blocks of their own
    shared = {"chunk_slots": [0], "chunk_starts": [0], "chunk_lens": [20], "tokens": prompt}
    first = executor.execute(
        plan(
            full=True,
            new_rows=[new_row(0), new_row(1)],
            table_slots=[0, 1],
            table_lens=[2, 2],
            table_blocks=[11, 12, 11, 12],
            chunk_samples=[[0, 1]],
            **shared,
        )
    )
    ids = [first.ids.tolist()]
    for step in range(4):
        copied = {"copies": [12, 30], "table_slots": [1], "table_lens": [2], "table_blocks": [11, 30]}
        ids.append(executor.execute(plan(decodes=2, **(copied if step == 0 else {}))).ids.tolist())
    assert [[row[i] for row in ids] for i in range(2)] == [expected, expected]


def test_a_preempted_row_computed_again_goes_on_alike(executor: ModelExecutor) -> None:
    prompt = random_models.prompts(30)[0]
    params = SamplingParams(temperature=1.0, seed=99)
    whole = Driver(executor).generate([prompt], 12, [params])[0]
    # the sequence comes back in another slot with 7 of its tokens as if they were prompt; noise depends on positions
    again = Driver(executor, seed=5).generate([[3], prompt + whole[:7]], 5, [GREEDY, params])[1]
    assert again == whole[7:]


def test_sampling_is_the_same_alone_and_in_a_batch(executor: ModelExecutor) -> None:
    prompts = random_models.prompts(4, 20, 33, 9, 2, 50)
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2),
        GREEDY,
        SamplingParams(temperature=1.3, top_k=40, seed=3),
        SamplingParams(temperature=1.0, min_p=0.05, seed=4),
        SamplingParams(temperature=1e-9, seed=4),  # as good as greedy
    ]
    together = Driver(executor, chunks=lambda i: 1 + i % 11, seed=3).generate(prompts, 10, params)
    alone = [Driver(executor).generate([p], 10, [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert together == alone
    assert Driver(executor).generate([prompts[5]], 10)[0] == together[5]
    other_seed = Driver(executor).generate([prompts[0]], 10, [SamplingParams(temperature=1.0, seed=7)])[0]
    assert other_seed != together[0]


def test_rows_come_and_go_while_others_run(folder: Path, executor: ModelExecutor) -> None:
    prompts = random_models.prompts(*range(1, 40, 3))
    alone = [Driver(executor).generate([prompt], 6)[0] for prompt in prompts]
    assert Driver(executor, budget=20, seed=8).generate(prompts, 6, at_once=3) == alone


def test_what_freed_blocks_hold_does_no_harm(executor: ModelExecutor) -> None:
    prompts = random_models.prompts(17, 40)
    expected = Driver(executor).generate(prompts, 6)
    for layer in executor._runner.kv:
        layer[1:] = float("nan")
    assert Driver(executor, seed=9).generate(prompts, 6) == expected
    assert all(torch.count_nonzero(layer[0]) == 0 for layer in executor._runner.kv)


def test_int8_kv_on_the_triton_kernels_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 runs on CPUs only, not with the Triton kernels"):
        random_models.executor(folder, attention_backend="triton", kv_cache_dtype="int8")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_int8_kv_says_so_and_answers_as_the_model_mostly_does(folder: Path, backend: str) -> None:
    executor = random_models.executor(folder, attention_backend=backend, kv_cache_dtype="int8")
    assert (executor.memory.kv_cache_dtype, executor.memory.dtype) == ("int8", "float32")
    assert executor.memory.bytes_per_block == 16 * 240
    prompts = random_models.prompts(20, 33, 50, 70, 90, 101)
    expected = Driver(random_models.executor(folder)).generate(prompts, 8)
    found = Driver(executor).generate(prompts, 8)
    assert sum(a[0] == b[0] for a, b in zip(found, expected, strict=True)) >= 5


@pytest.mark.parametrize(("kv_cache_dtype", "token_bytes"), [("auto", 768), ("int8", 240)])
def test_a_row_swapped_out_and_in_goes_on_alike_in_other_blocks(
    folder: Path, kv_cache_dtype: str, token_bytes: int
) -> None:
    """KV that was moved to the host and back, into other blocks, is the same to the last bit."""
    executor = random_models.executor(folder, swap_space=2 * 16 * token_bytes, kv_cache_dtype=kv_cache_dtype)
    assert executor.memory.host_blocks == 2
    prompt = random_models.prompts(20)[0]
    expected = Driver(executor).generate([prompt], 5)[0]
    entry = {"table_slots": [0], "table_lens": [2], "chunk_slots": [0], "chunk_samples": [[0]]}
    ids = [
        executor.execute(
            plan(
                full=True,
                new_rows=[new_row(0)],
                table_blocks=[11, 12],
                chunk_starts=[0],
                chunk_lens=[20],
                tokens=prompt,
                **entry,
            )
        ).ids.tolist()
    ]
    ids.append(executor.execute(plan(decodes=1)).ids.tolist())
    out = executor.execute(plan(release=[0], swap_out=[11, 1, 12, 0]))
    assert out.timings["swap_out"] > 0
    for layer in executor._runner.kv:
        layer[1:] = -1 if kv_cache_dtype == "int8" else float("nan")
    back = {"swap_in": [1, 30, 0, 29], "table_blocks": [30, 29], "chunk_starts": [21], "chunk_lens": [1]}
    ids.append(executor.execute(plan(new_rows=[new_row(0, length=21)], tokens=ids[-1], **back, **entry)).ids.tolist())
    ids += [executor.execute(plan(decodes=1)).ids.tolist() for _ in range(2)]
    assert [one for (one,) in ids] == expected


def test_the_host_pool_is_never_larger_than_the_device_pool(folder: Path) -> None:
    memory = random_models.executor(folder, swap_space=1 << 30).memory
    assert memory.host_blocks == memory.num_blocks - 1


def test_logprobs_are_those_of_the_models_own_distribution(executor: ModelExecutor) -> None:
    """Against a float64 softmax of the logits; a row that did not ask has none, whatever its neighbours asked."""
    prompts = random_models.prompts(9, 12)
    logits = []
    original = executor.decoder.step

    def keeping(*args: Any) -> tuple[torch.Tensor, dict[str, float]]:
        found, parts = original(*args)
        logits.append(found.clone())
        return found, parts

    executor.decoder.step = keeping  # type: ignore[method-assign]
    try:
        params = SamplingParams(temperature=1.3, seed=5)
        output = executor.execute(
            two_prompts(prompts, [new_row(0), dataclasses.replace(new_row(1, params), logprobs=3)])
        )
    finally:
        executor.decoder.step = original  # type: ignore[method-assign]
    found = output.logprobs
    assert found is not None
    exact = torch.log_softmax(logits[0][1].double(), -1)
    assert (found.entries, found.top_counts) == ([1], [3])
    assert found.top_ids == exact.topk(3).indices.tolist()
    assert found.top == pytest.approx(exact.topk(3).values.tolist(), abs=1e-5)
    assert found.sampled == pytest.approx([exact[output.ids[1]].item()], abs=1e-5)
    assert found.ranks == [int((exact > exact[output.ids[1]]).sum()) + 1]
    assert executor.execute(plan(full=True)).logprobs is None
