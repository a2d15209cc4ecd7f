"""Plans against the rows they name: what they change, and that a wrong one changes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.worker.executor import PlanError
from services.worker.rows import Limits, Rows
from shared.sampling import SamplingParams
from tests.services.worker.plans import new_row, plan

LIMITS = Limits(max_num_seqs=4, num_blocks=20, block_size=16, max_model_len=100, vocab_size=50)


def one_decoding() -> Rows:
    """Slot 1 holds 17 tokens in blocks 3 and 4 and decodes; slot 2 has computed 5 of its prompt, in block 5."""
    rows = Rows(LIMITS)
    rows.apply(
        plan(
            full=True,
            new_rows=[new_row(1), new_row(2)],
            table_slots=[1, 2],
            table_lens=[2, 1],
            table_blocks=[3, 4, 5],
            chunk_slots=[1, 2],
            chunk_starts=[0, 0],
            chunk_lens=[17, 5],
            chunk_samples=[[1], []],
            tokens=[7] * 22,
        )
    )
    return rows


def test_decodes_come_first_then_chunks() -> None:
    rows = one_decoding()
    step = rows.apply(
        plan(
            decodes=1,
            chunk_slots=[2],
            chunk_starts=[5],
            chunk_lens=[3],
            chunk_samples=[[2]],
            tokens=[1, 2, 3],
        )
    )
    assert step.token_slots.tolist() == [1, 2, 2, 2]
    assert step.positions.tolist() == [17, 5, 6, 7]
    assert rows.slot_mapping(step).tolist() == [4 * 16 + 1, 5 * 16 + 5, 5 * 16 + 6, 5 * 16 + 7]
    assert (step.sample_tokens.tolist(), step.sample_slots.tolist()) == ([0, 3], [1, 2])
    assert step.sample_positions.tolist() == [18, 8]
    assert rows.state.length.tolist() == [0, 18, 8, 0]
    following = rows.apply(plan(decodes=2))
    assert (following.decode_slots.tolist(), following.positions.tolist()) == ([1, 2], [18, 8])


def test_blocks_are_appended_in_order_and_tables_replaced_whole() -> None:
    rows = one_decoding()
    rows.apply(plan(decodes=1, append_slots=[1, 2, 1], append_blocks=[6, 7, 8]))
    assert rows.tables[1, :5].tolist() == [3, 4, 6, 8, 0]
    assert rows.tables[2, :3].tolist() == [5, 7, 0]
    rows.apply(plan(decodes=1, table_slots=[1], table_lens=[2], table_blocks=[9, 10]))
    assert rows.tables[1, :5].tolist() == [9, 10, 0, 0, 0]


def test_a_paused_row_is_left_out_until_it_resumes() -> None:
    rows = one_decoding()
    assert rows.apply(plan(decodes=0, pause=[1])).positions.tolist() == []
    assert rows.apply(plan(decodes=0)).positions.tolist() == []
    assert rows.apply(plan(decodes=1, resume=[1])).positions.tolist() == [17]


def test_a_released_slot_can_be_taken_in_the_same_plan() -> None:
    rows = one_decoding()
    step = rows.apply(
        plan(
            release=[1],
            new_rows=[new_row(1)],
            table_slots=[1],
            table_lens=[1],
            table_blocks=[9],
            chunk_slots=[1],
            chunk_starts=[0],
            chunk_lens=[2],
            chunk_samples=[[1]],
            tokens=[1, 2],
        )
    )
    assert step.positions.tolist() == [0, 1]
    assert rows.tables[1, :2].tolist() == [9, 0]


def test_one_chunk_can_be_sampled_into_several_rows() -> None:
    rows = Rows(LIMITS)
    step = rows.apply(
        plan(
            full=True,
            new_rows=[new_row(0), new_row(3)],
            table_slots=[0, 3],
            table_lens=[1, 1],
            table_blocks=[2, 2],
            chunk_slots=[0],
            chunk_starts=[0],
            chunk_lens=[6],
            chunk_samples=[[0, 3]],
            tokens=[1] * 6,
        )
    )
    assert (step.sample_tokens.tolist(), step.sample_slots.tolist()) == ([5, 5], [0, 3])
    assert rows.apply(plan(decodes=2)).positions.tolist() == [6, 6]


def test_a_full_plan_drops_every_row() -> None:
    rows = one_decoding()
    rows.apply(plan(full=True))
    assert not rows.state.alive.any()
    assert rows.apply(plan()).positions.tolist() == []


ENTER: dict[str, Any] = {"decodes": 1, "table_slots": [0], "table_lens": [1], "table_blocks": [6]}
CHUNK: dict[str, Any] = {"decodes": 1, "chunk_starts": [5], "chunk_lens": [1], "chunk_samples": [[]], "tokens": [1]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decodes": 0}, "counts 0 decoding rows; there are 1"),
        ({"decodes": 1, "release": [0]}, "slot 0: releases a slot that holds no row"),
        ({"decodes": 1, "release": [4]}, r"slot 4: releases a slot outside 0\.\.3"),
        (ENTER | {"new_rows": [new_row(2)]}, "slot 2: a new row where one is already"),
        (ENTER | {"new_rows": [new_row(3)]}, "slot 3: a new row without a block table"),
        (ENTER | {"new_rows": [new_row(9)]}, r"slot 9: a new row outside 0\.\.3"),
        (ENTER | {"new_rows": [new_row(0, length=100)]}, r"slot 0: length 100 is outside 0\.\.99"),
        (ENTER | {"new_rows": [new_row(0, length=17)]}, "slot 0: a table of 1 blocks does not hold its 17 tokens"),
        (ENTER | {"new_rows": [new_row(0, SamplingParams(top_p=0.0))]}, "slot 0: top_p 0.0 is out of range"),
        (ENTER | {"new_rows": [new_row(0, SamplingParams(temperature=float("nan")))]}, "slot 0: temperature nan"),
        (ENTER | {"new_rows": [new_row(0)], "table_blocks": [0]}, r"outside 1\.\.19"),
        (ENTER | {"new_rows": [new_row(0)], "table_blocks": [20]}, r"outside 1\.\.19"),
        (ENTER | {"new_rows": [new_row(0)], "table_lens": [2]}, "table_slots, table_lens and table_blocks"),
        (ENTER, "slot 0: a table for a slot that holds no row"),
        ({"decodes": 1, "append_slots": [1], "append_blocks": [0]}, r"outside 1\.\.19"),
        ({"decodes": 1, "append_slots": [3], "append_blocks": [6]}, "slot 3: appends to a slot that holds no row"),
        ({"decodes": 1, "append_slots": [1] * 6, "append_blocks": [6] * 6}, "slot 1: its table is longer than 7"),
        ({"decodes": 1, "resume": [1]}, "slot 1: resumed, but not paused"),
        ({"decodes": 0, "pause": [1, 1]}, "slot 1: paused twice"),
        ({"decodes": 1, "swap_out": [3, 1]}, r"swap_out name a block outside 0\.\.-1"),
        ({"decodes": 1, "copies": [3]}, "not pairs"),
        ({"decodes": 1, "copies": [3, 0]}, r"outside 1\.\.19"),
        ({"decodes": 1, "copies": [3, 6, 6, 7]}, "source and destination"),
        ({"decodes": 1, "copies": [3, 6, 4, 6]}, "destination of two moves"),
        (CHUNK | {"chunk_slots": [0]}, "slot 0: a chunk for a slot that holds no row"),
        (CHUNK | {"chunk_slots": [1]}, "slot 1: a chunk for a row that is decoding"),
        (CHUNK | {"chunk_slots": [2], "pause": [2]}, "slot 2: a chunk for a row that is paused"),
        (CHUNK | {"chunk_slots": [2], "chunk_starts": [6]}, "slot 2: a chunk from position 6, but it holds 5 tokens"),
        (CHUNK | {"chunk_slots": [2], "chunk_lens": [0], "tokens": []}, "slot 2: a chunk of 0 tokens"),
        (CHUNK | {"chunk_slots": [2], "chunk_lens": [12], "tokens": [1] * 12}, "1 blocks is too short for 17 tokens"),
        (CHUNK | {"chunk_slots": [2], "tokens": [1, 1]}, "add up to 1, but there are 2 tokens"),
        (CHUNK | {"chunk_slots": [2], "tokens": [50]}, r"a token id is outside 0\.\.49"),
        (CHUNK | {"chunk_slots": [2], "chunk_samples": [[1]]}, "slot 1: sampled into while paused or decoding"),
        (CHUNK | {"chunk_slots": [2], "chunk_samples": [[2, 2]]}, "slot 2: sampled into while .* or twice"),
        (CHUNK | {"chunk_slots": [2, 2]}, "differ in length"),
    ],
)
def test_a_wrong_plan_is_named_and_changes_nothing(wrong: dict[str, Any], message: str) -> None:
    rows = one_decoding()
    before = copy.deepcopy(vars(rows))
    with pytest.raises(PlanError, match=message):
        rows.apply(plan(**wrong))
    for name, value in vars(rows).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, before[name]), name
    assert all(np.array_equal(getattr(rows.state, f), getattr(before["state"], f)) for f in vars(rows.state))


def test_a_row_never_passes_max_model_len() -> None:
    rows = Rows(replace(LIMITS, max_model_len=18, block_size=32))
    rows.apply(
        plan(
            full=True,
            new_rows=[new_row(0)],
            table_slots=[0],
            table_lens=[1],
            table_blocks=[1],
            chunk_slots=[0],
            chunk_starts=[0],
            chunk_lens=[17],
            chunk_samples=[[0]],
            tokens=[1] * 17,
        )
    )
    rows.apply(plan(decodes=1))
    with pytest.raises(PlanError, match="slot 0: more than max_model_len 18 tokens"):
        rows.apply(plan(decodes=1))
