"""``--logprobs-mode``: what is told of sampled tokens, prompts and runs, against float64 and transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels import ops
from services.worker import machine
from services.worker.device import Cpu
from services.worker.logprobs import LogprobsMode
from services.worker.rows import Limits, Rows
from services.worker.sampler import Sampler
from shared.sampling import LogitRules, SamplingParams
from shared.wire import Logprobs, NewRow, RowRules, Run
from tests.services.worker import random_models
from tests.services.worker.plans import new_row, plan
from tests.services.worker.test_logit_rules import OUTPUT, PROMPT, reference, ruled
from tests.services.worker.test_masks import mask

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
VOCAB = 12
LOGITS = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
RULES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "logit_bias_ids": [2],
    "logit_bias": [2.0],
}
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 8},
]
ALLOWED = [1, 4, 6, 7, 11]


def entries() -> list[NewRow]:
    """Greedy under rules; temperature alone; all filters; rules, filters and a mask; who did not ask; who is ranked."""
    return [
        NewRow(0, 0, 0, 0.0, 1.0, 5, 0.0, 0, VOCAB, ruled(**RULES)),
        NewRow(1, 0, 0, 0.7, 1.0, 0, 0.0, 1, VOCAB),
        NewRow(2, 0, 0, 1.4, 0.9, 6, 0.02, 2, VOCAB),
        NewRow(3, 0, 0, 0.8, 1.0, 8, 0.0, 3, VOCAB, ruled(**RULES), True),
        NewRow(4, 0, 0, 1.0, 1.0, 0, 0.0, 4),
        NewRow(5, 0, 0, 0.9, 0.8, 0, 0.0, 5, VOCAB, ranked=True),
    ]


def sample(mode: str, kernels: str, masked: bool = True) -> tuple[list[int], Logprobs]:
    """The ids of one step on ``LOGITS``, each row about to sample what comes after PROMPT + OUTPUT."""
    count, length = len(LOGITS), len(PROMPT + OUTPUT)
    rows = Rows(Limits(count, 100, 16, 64, VOCAB))
    sampler = Sampler(rows, ops.select(torch.device("cpu"), kernels), Cpu(machine.Cgroup()), LogprobsMode.named(mode))
    first = plan(
        full=True,
        new_rows=[dataclasses.replace(row, masked=row.masked and masked) for row in entries()],
        table_slots=list(range(count)),
        table_lens=[1] * count,
        table_blocks=list(range(1, count + 1)),
        chunk_slots=list(range(count)),
        chunk_starts=[0] * count,
        chunk_lens=[length] * count,
        chunk_samples=[[slot] for slot in range(count)],
        tokens=(PROMPT + OUTPUT) * count,
    )
    step = rows.apply(first)
    sampler.change(first)
    ids, told = sampler.sample(LOGITS.clone(), step, lambda: mask({3: ALLOWED}, VOCAB)).take()
    assert told is not None and told.entries == [0, 1, 2, 3, 5] and told.top_counts == [VOCAB] * 5
    return ids.tolist(), told


def processed(row: int) -> Any:
    """Probabilities of entry ``row`` after everything, float64."""
    banned = [token for token in range(VOCAB) if token not in ALLOWED] if row == 3 else []
    rules = LogitRules(**RULES) if row in (0, 3) else LogitRules()
    return reference(LOGITS[row].double().numpy(), rules, banned, FILTERS[row])


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_told_of_sampled_tokens(mode: str, kernels: str) -> None:
    """Every row alone, whatever its neighbours asked for; what ranks answers is the model's own in every mode."""
    ids, told = sample(mode, kernels)
    logprobs = torch.log_softmax(LOGITS.double(), -1).numpy()
    for place, row in enumerate(told.entries):
        part = slice(place * VOCAB, (place + 1) * VOCAB)
        found = np.empty(VOCAB)
        found[told.top_ids[part]] = told.top[part]
        if row == 5 or mode == "raw_logprobs":
            expected = logprobs[row]
        elif mode == "raw_logits":
            expected = LOGITS[row].double().numpy()
        else:
            with np.errstate(divide="ignore"):
                expected = np.log(processed(row))
            if mode == "processed_logits":  # which are these but for a constant
                assert np.isfinite(found).sum() > 1
                expected = expected + found[ids[row]] - expected[ids[row]]
        np.testing.assert_allclose(found, expected, atol=2e-5)
        assert told.sampled[place] == pytest.approx(expected[ids[row]], abs=2e-5)
        assert told.ranks[place] == (expected > expected[ids[row]] + 1e-6).sum() + 1
        assert told.top[part] == sorted(told.top[part], reverse=True)
    if mode == "processed_logits":
        assert told.top[VOCAB] == pytest.approx(LOGITS[1].max().item() / 0.7)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_is_sampled_in_every_mode(mode: str) -> None:
    for masked in (True, False):  # rules and masks take other ways through the sampler
        assert sample(mode, "cpu", masked)[0] == sample("raw_logprobs", "cpu", masked)[0]


@pytest.mark.parametrize("mode", MODES)
def test_what_is_told_of_prompts_and_runs(mode: str, tmp_path: Path) -> None:
    """Nobody sampled a prompt, so its logits have no temperature; a run's tokens were all that their masks left."""
    model = random_models.save(tmp_path, "llama")
    executor = random_models.executor(tmp_path, logprobs_mode=mode)
    [ids] = random_models.prompts(12)
    prompt, run = ids[:9], ids[9:]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].double()
    row = new_row(0, SamplingParams(temperature=0.5, seed=3))
    rules = RowRules(len(prompt), ids, [], LogitRules(), 2)
    output = executor.execute(
        plan(
            full=True,
            new_rows=[dataclasses.replace(row, logprobs=1, rules=rules, run=Run(len(prompt), run))],
            table_slots=[0],
            table_lens=[1],
            table_blocks=[1],
            chunk_slots=[0],
            chunk_starts=[0],
            chunk_lens=[len(ids)],
            chunk_samples=[[0]],
            tokens=ids,
        )
    )
    assert output.prompt_logprobs is not None and output.logprobs is not None
    raw = logits if mode.endswith("logits") else torch.log_softmax(logits, -1)
    own = [raw[place, token].item() for place, token in enumerate(ids[1:])]
    if mode.startswith("processed"):
        held = [logits[place, ids[place + 1]].item() / 0.5 for place in range(8, 11)]
        own[8:] = held if mode == "processed_logits" else [0.0] * 3
        assert output.prompt_logprobs.top_ids[-3:] == run and output.prompt_logprobs.ranks[-3:] == [1, 1, 1]
    assert output.prompt_logprobs.sampled == pytest.approx(own, abs=1e-4)
    assert output.prompt_logprobs.top[:16] == pytest.approx(raw[:8].topk(2).values.flatten().tolist(), abs=1e-4)
    sampled = logits[-1] / 0.5 if mode.startswith("processed") else logits[-1]
    expected = sampled if mode.endswith("logits") else torch.log_softmax(sampled, -1)
    assert output.logprobs.sampled == pytest.approx([expected[output.ids[0]].item()], abs=1e-4)
