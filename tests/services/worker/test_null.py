"""The null executor finds the plans that a real worker would silently read wrong memory for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.worker.config import WorkerConfig
from services.worker.executor import PlanError
from services.worker.null import NullExecutor
from shared.codec import int32, no_ids
from shared.models import builtin, locate
from shared.wire import NewRow, Plan
from tests.services.scheduler.simulation import EOS, VOCAB, toy_output

EMPTY = Plan(
    step_id=1,
    scheduler_epoch=1,
    worker_epoch=1,
    full=False,
    decodes=0,
    new_rows=[],
    chunk_slots=[],
    chunk_starts=[],
    chunk_lens=[],
    chunk_samples=[],
    table_slots=[],
    table_lens=[],
    pause=[],
    resume=[],
    release=[],
    tokens=no_ids(),
    table_blocks=no_ids(),
    append_slots=no_ids(),
    append_blocks=no_ids(),
    swap_out=no_ids(),
    swap_in=no_ids(),
    copies=no_ids(),
)


def executor(verify: bool = True, **more: Any) -> NullExecutor:
    defaults: dict[str, Any] = {"num_blocks": 16, "block_size": 4, "max_model_len": 40, "max_num_seqs": 4}
    return NullExecutor(**{**defaults, **more}, vocab_size=VOCAB, eos_ids=[EOS], verify=verify)


def row(slot: int, length: int = 0, temperature: float = 0.0, seed: int = 0) -> NewRow:
    return NewRow(slot, 1, length, temperature, 1.0, 0, 0.0, seed)


def prefill(slot: int, prompt: list[int], blocks: list[int], **changes: Any) -> Plan:
    plan = replace(
        EMPTY,
        new_rows=[row(slot)],
        chunk_slots=[slot],
        chunk_starts=[0],
        chunk_lens=[len(prompt)],
        chunk_samples=[[slot]],
        table_slots=[slot],
        table_lens=[len(blocks)],
        tokens=int32(prompt),
        table_blocks=int32(blocks),
    )
    return replace(plan, **changes)


def decode(count: int, **changes: Any) -> Plan:
    return replace(EMPTY, decodes=count, **changes)


@pytest.mark.parametrize("verify", [True, False])
def test_a_row_gives_the_function_of_its_prefix_across_scattered_blocks(verify: bool) -> None:
    null = executor(verify)
    ids = null.execute(prefill(2, [7, 8, 9], [11])).ids.tolist()
    ids += null.execute(decode(1)).ids.tolist()
    ids += null.execute(decode(1, append_slots=int32([2]), append_blocks=int32([3]))).ids.tolist()
    ids += null.execute(decode(1)).ids.tolist()
    assert ids == toy_output([7, 8, 9], 4)


@pytest.mark.parametrize("verify", [True, False])
def test_chunks_of_a_prompt_equal_the_whole(verify: bool) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 6]
    null = executor(verify)
    first = prefill(0, prompt[:3], [1], chunk_samples=[[]])
    assert null.execute(first).slots.tolist() == []
    rest = replace(prefill(0, prompt[3:], [1, 2], new_rows=[]), chunk_starts=[3])
    assert null.execute(rest).ids.tolist() == toy_output(prompt, 1)


def test_results_are_decodes_by_slot_then_chunks_in_plan_order() -> None:
    null = executor()
    null.execute(prefill(3, [7], [1]))
    null.execute(prefill(0, [8], [2], decodes=1))
    assert null.execute(prefill(1, [9], [3], decodes=2)).slots.tolist() == [0, 3, 1]


@pytest.mark.parametrize("verify", [True, False])
def test_a_block_given_to_another_too_early_is_noticed(verify: bool) -> None:
    null = executor(verify)
    null.execute(prefill(0, [7, 8], [5]))
    with pytest.raises(PlanError, match="slot 0 reads memory that is not its own prefix"):
        null.execute(prefill(1, [1, 2, 3], [5], decodes=1))
        null.execute(decode(2))


def test_a_stale_table_is_noticed() -> None:
    null = executor()
    null.execute(prefill(0, [7, 8, 9, 6, 5], [5, 6]))
    with pytest.raises(PlanError, match="slot 0 reads memory that is not its own prefix"):
        null.execute(decode(1, table_slots=[0], table_lens=[2], table_blocks=int32([5, 7])))


def test_verify_notices_a_wrong_token_far_behind_the_newest() -> None:
    plan = decode(1, copies=int32([9, 1]))
    for verify in (True, False):
        null = executor(verify)
        null.execute(prefill(0, [7, 8, 9, 6, 5], [1, 2]))
        if verify:
            with pytest.raises(PlanError, match="not its own prefix"):
                null.execute(plan)
        else:
            null.execute(plan)  # the newest token's memory is right: only verify reads the rest


def test_released_memory_keeps_its_contents_until_another_row_gets_it() -> None:
    null = executor()
    null.execute(prefill(0, [7, 8, 9, 6], [5]))
    null.execute(replace(EMPTY, release=[0]))
    again = prefill(1, [1], [5, 6], new_rows=[row(1, length=4)], chunk_starts=[4])
    assert null.execute(again).ids.tolist() == toy_output([7, 8, 9, 6, 1], 1)
    null.execute(replace(EMPTY, release=[1]))
    null.execute(prefill(2, [2], [5]))
    null.execute(replace(EMPTY, release=[2]))
    with pytest.raises(PlanError, match="not its own prefix"):
        null.execute(again)


def test_a_cached_last_token_is_computed_again_and_not_stored() -> None:
    null = executor()
    null.execute(prefill(0, [7, 8, 9, 6], [5]))
    plan = prefill(1, [6], [5], new_rows=[row(1, length=4)], chunk_starts=[3], decodes=1)
    plan = replace(plan, append_slots=int32([0]), append_blocks=int32([8]))
    assert null.execute(plan).ids.tolist()[1] == toy_output([7, 8, 9, 6], 1)[0]
    with pytest.raises(PlanError, match="slot 2 computes other tokens again than those it holds"):
        null.execute(
            prefill(
                2,
                [1],
                [5],
                new_rows=[row(2, length=4)],
                chunk_starts=[3],
                decodes=2,
                append_slots=int32([1]),
                append_blocks=int32([9]),
            )
        )


def test_a_shared_prefix_is_read_from_memory() -> None:
    null = executor()
    null.execute(prefill(0, [7, 8, 9, 6], [5]))
    plan = prefill(1, [1], [5, 6], new_rows=[row(1, length=4)], chunk_starts=[4], decodes=1)
    plan = replace(plan, append_slots=int32([0]), append_blocks=int32([8]))
    assert null.execute(plan).ids.tolist()[1] == toy_output([7, 8, 9, 6, 1], 1)[0]


def test_one_prompt_samples_into_several_slots() -> None:
    null = executor()
    plan = replace(
        prefill(0, [7, 8, 9, 6], [5], new_rows=[row(0, temperature=1.0, seed=4), row(1, temperature=1.0, seed=5)]),
        chunk_samples=[[0, 1]],
        table_slots=[0, 1],
        table_lens=[1, 1],
        table_blocks=int32([5, 5]),
    )
    first = null.execute(plan).ids.tolist()
    second = null.execute(decode(2, append_slots=int32([0, 1]), append_blocks=int32([2, 3]))).ids.tolist()
    assert [first[0], second[0]] == toy_output([7, 8, 9, 6], 2, 1.0, 4)
    assert [first[1], second[1]] == toy_output([7, 8, 9, 6], 2, 1.0, 5)


def test_copies_move_whole_blocks_before_the_stores() -> None:
    null = executor()
    null.execute(prefill(0, [7, 8], [5]))
    plan = decode(1, copies=int32([5, 6]), table_slots=[0], table_lens=[1], table_blocks=int32([6]))
    assert null.execute(plan).ids.tolist() == toy_output([7, 8], 2)[1:]


def test_paused_rows_wait_and_a_full_plan_drops_all() -> None:
    null = executor()
    null.execute(prefill(0, [7, 8], [5]))
    assert null.execute(decode(0, pause=[0])).ids.tolist() == []
    assert null.execute(decode(1, resume=[0])).ids.tolist() == toy_output([7, 8], 2)[1:]
    assert null.execute(prefill(0, [9], [5], full=True)).ids.tolist() == toy_output([9], 1)


def test_eos_comes_only_above_temperature_1() -> None:
    for temperature, ends in ((0.0, False), (1.0, False), (2.0, True)):
        null = executor(num_blocks=80, block_size=4, max_model_len=300, max_num_seqs=1)
        null.execute(prefill(0, [7], list(range(1, 76)), new_rows=[row(0, temperature=temperature, seed=3)]))
        ids = np.concatenate([null.execute(decode(1)).ids for _ in range(250)])
        assert (EOS in ids) == ends


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (decode(1), "counts 1 decoding rows; there are 0"),
        (replace(EMPTY, release=[1]), "slot 1: releases a slot that holds no row"),
        (prefill(0, [1, 2, 3, 4, 5], [1]), "slot 0: a table of 1 blocks is too short for 5 tokens"),
        (prefill(0, [1], [0]), r"a block of a table is outside 1..15"),
        (prefill(0, [1], [16]), r"a block of a table is outside 1..15"),
        (prefill(9, [1], [1]), r"slot 9: a new row outside 0..3"),
        (
            prefill(0, [1], [1], table_slots=[], table_lens=[], table_blocks=no_ids()),
            "slot 0: a new row without a block table",
        ),
        (prefill(0, [1], [1], chunk_starts=[1]), "slot 0: a chunk from position 1, but it holds 0 tokens"),
        (prefill(0, [1, 2], [1], chunk_lens=[1]), "add up to 1, but there are 2 tokens"),
        (prefill(0, [1, 2, 3, 4, 5], [1, 1]), "stored in the same place"),
        (replace(EMPTY, swap_in=int32([1, 2])), "swap_in name a block outside"),
    ],
)
def test_plans_that_cannot_be_right(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        executor().execute(plan)


def test_a_slot_in_use_and_max_model_len_are_kept() -> None:
    null = executor()
    null.execute(prefill(0, [1] * 39, list(range(1, 11))))
    with pytest.raises(PlanError, match="slot 0: a new row where one is already"):
        null.execute(prefill(0, [1], [11], decodes=1))
    null.execute(decode(1))
    with pytest.raises(PlanError, match="is too short for 41 tokens"):
        null.execute(decode(1))


def test_memory_without_a_model() -> None:
    memory = NullExecutor.from_config(WorkerConfig(worker="null")).memory
    assert (memory.vocab_size, memory.eos_ids, memory.num_blocks, memory.max_model_len) == (49_152, [2], 4096, 2048)
    assert (memory.model_digest, memory.model_name) == (builtin.SHA256, builtin.NAME)
    memory = NullExecutor.from_config(WorkerConfig(worker="null", num_gpu_blocks_override=9, max_model_len=77)).memory
    assert (memory.num_blocks, memory.max_model_len, memory.host_blocks) == (9, 77, 0)


def test_a_model_folder_gives_vocabulary_and_eos(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99, "eos_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    null = WorkerConfig(model=str(tmp_path), worker="null")
    memory = NullExecutor.from_config(null).memory
    assert (memory.vocab_size, memory.eos_ids) == (99, [3])
    assert (memory.model_digest, memory.model_name) == (locate(str(tmp_path)).digest, str(tmp_path))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert NullExecutor.from_config(null).memory.eos_ids == [3, 5]
