"""Masks on logits and in whole steps: what is not allowed is never sampled, others are left alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.executor import PlanError
from services.worker.masks import Masks
from services.worker.model_executor import ModelExecutor
from shared.codec import int32
from shared.sampling import LogitRules, SamplingParams
from shared.wire import Mask, RowRules
from tests.services.worker import random_models
from tests.services.worker.plans import new_row, plan, two_prompts

VOCAB = 70  # not a multiple of 32


def mask(allowed: dict[int, list[int]], vocab_size: int = VOCAB) -> Mask:
    """Slots with the tokens they may sample."""
    words = -(-vocab_size // 32)
    bits = [0] * (len(allowed) * words)
    for row, tokens in enumerate(allowed.values()):
        for token in tokens:
            bits[row * words + token // 32] |= 1 << token % 32
    return Mask(1, 1, 1, list(allowed), np.asarray(bits, dtype=np.uint32).view(np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("allowed", [{5: [0, 31, 32, 69]}, {3: [1], 5: [69], 9: [2, 64]}, {9: list(range(VOCAB))}, {}])
def test_what_a_mask_does_not_allow_is_banned(dtype: torch.dtype, allowed: dict[int, list[int]]) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    before, slots = logits.clone(), [9, 3, 5]
    held = Masks(torch.from_numpy).apply(logits, mask(allowed), np.asarray(slots), np.ones(10, dtype=np.bool_))
    assert sorted(held.tolist()) == sorted(slots.index(slot) for slot in allowed)
    for place, slot in enumerate(slots):
        for token in range(VOCAB):
            banned = slot in allowed and token not in allowed[slot]
            assert logits[place, token] == (float("-inf") if banned else before[place, token])


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (mask({4: [1]}), "a mask for slots"),
        (mask({9: [1]}), "a mask for slots"),
        (Mask(1, 1, 1, [5, 5], int32([1] * 6)), "a mask for slots"),
        (Mask(1, 1, 1, [5], int32([1] * 2)), "2 words of mask for 1 rows of 70 tokens"),
    ],
)
def test_a_mask_for_others_is_an_error(wrong: Mask, complaint: str) -> None:
    masked = np.zeros(10, dtype=np.bool_)
    masked[[3, 4, 5]] = True
    with pytest.raises(PlanError, match=complaint):
        Masks(torch.from_numpy).apply(torch.zeros(3, VOCAB), wrong, np.asarray([9, 3, 5]), masked)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelExecutor]:
    folder: Path = tmp_path_factory.mktemp("masked")
    random_models.save(folder, "llama")
    yield random_models.executor(folder)


def step(rows: list[Any], **changes: Any) -> Any:
    return two_prompts(random_models.prompts(9, 12), rows, **changes)


def masked_row(slot: int, **fields: Any) -> Any:
    return dataclasses.replace(new_row(slot, fields.pop("params", new_row.__defaults__[0])), masked=True, **fields)


def test_a_masked_row_samples_what_is_allowed_and_its_neighbour_what_it_likes(executor: ModelExecutor) -> None:
    free = executor.execute(step([new_row(0), new_row(1)])).ids.tolist()
    allowed = [token for token in range(320) if token not in free][:20]
    asked: list[int] = []

    def source() -> Mask:
        asked.append(1)
        return mask({0: allowed}, 320)

    ids = executor.execute(step([masked_row(0), new_row(1)]), source).ids.tolist()
    assert ids[0] in allowed
    assert ids[1] == free[1]
    assert asked == [1]
    ids = executor.execute(plan(decodes=2), lambda: mask({0: [7]}, 320)).ids.tolist()
    assert ids[0] == 7
    hot = SamplingParams(temperature=5.0, seed=3)
    drawn = {
        executor.execute(step([masked_row(0, params=dataclasses.replace(hot, seed=seed)), new_row(1)]), source).ids[0]
        for seed in range(40)
    }
    assert drawn <= set(allowed) and len(drawn) > 3


def test_logprobs_stay_the_models_own(executor: ModelExecutor) -> None:
    """Of the token that a mask leaves, as the same step tells it without the mask."""
    plain = executor.execute(step([dataclasses.replace(new_row(0), logprobs=320), new_row(1)])).logprobs
    assert plain is not None
    own = dict(zip(plain.top_ids, plain.top, strict=True))
    output = executor.execute(step([masked_row(0, logprobs=1), new_row(1)]), lambda: mask({0: [300]}, 320))
    assert output.ids[0] == 300 and output.logprobs is not None
    assert output.logprobs.sampled == pytest.approx([own[300]], abs=1e-5)
    assert output.logprobs.top == pytest.approx([max(own.values())], abs=1e-5)


def test_mask_and_rules_that_leave_nothing_give_no_token(executor: ModelExecutor) -> None:
    rules = RowRules(9, [], [], LogitRules(allowed_token_ids=[5, 6]))
    free = executor.execute(step([new_row(0), new_row(1)])).ids.tolist()
    output = executor.execute(step([masked_row(0, rules=rules), new_row(1)]), lambda: mask({0: [7, 8]}, 320))
    assert output.ids.tolist() == [-1, free[1]]
    output = executor.execute(plan(decodes=2), lambda: mask({0: [6, 7]}, 320))  # the row goes on, and nobody minds
    assert output.ids.tolist()[0] == 6


def test_a_row_that_is_over_has_no_mask(executor: ModelExecutor) -> None:
    free = executor.execute(step([new_row(0), new_row(1)])).ids.tolist()
    assert executor.execute(step([masked_row(0), new_row(1)]), lambda: mask({}, 320)).ids.tolist() == free
    assert executor.execute(step([masked_row(0), new_row(1)]), lambda: None).ids.tolist() == free


def test_masked_rows_without_a_mask_are_an_error(executor: ModelExecutor) -> None:
    with pytest.raises(PlanError, match="has no mask"):
        executor.execute(step([masked_row(0), new_row(1)]))
