"""Rules on logits against hand computation, transformers' processors, and float64 distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TypicalLogitsWarper,
)

from kernels import ops
from services.worker.logit_rules import LogitRules, RuledRow
from shared import sampling
from shared.wire import NewRow, RowRules
from tests.services.worker.plans import plan

VOCAB = 50
PROMPT, OUTPUT = [3, 4, 4, 9], [7, 7, 3]


def ruled(output: list[int] = OUTPUT, *, stop_ids: list[int] | None = None, **rules: Any) -> RowRules:
    return RowRules(len(PROMPT), PROMPT + output, stop_ids or [], sampling.LogitRules(**rules))


def apply(logits: torch.Tensor, rows: dict[int, RowRules], temperature: float = 1.0) -> torch.Tensor:
    """The rules of rows at their places in ``logits``, each about to sample the token after its last."""
    batch = LogitRules(torch.from_numpy)
    new = [NewRow(slot, 0, 0, temperature, 1.0, 0, 0.0, 0, rules=row) for slot, row in rows.items()]
    batch.change(plan(new_rows=new))
    slots = np.arange(len(logits))
    positions = np.full(len(logits), len(PROMPT) + len(OUTPUT))
    temperatures = np.full(len(logits), temperature, dtype=np.float32)
    return batch.apply(logits, batch.among(slots), positions, temperatures)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def test_penalties_by_hand() -> None:
    """repetition of prompt and output first, then frequency and presence of the output, as vLLM orders them."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 7], logits[0, 8] = 2.0, -2.0, 4.0, 4.0
    row = ruled(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    found = apply(logits, {0: row})[0]
    assert found[3] == 2.0 / 2 - 0.5 * 1 - 0.25  # in both
    assert found[4] == -2.0 * 2  # in the prompt only
    assert found[7] == 4.0 / 2 - 0.5 * 2 - 0.25  # twice in the output
    assert found[8] == 4.0
    assert (logits[0, 3], logits[0, 7]) == (2.0, 4.0)  # the model's own stay for logprobs


def test_other_rows_keep_their_logits(logits: torch.Tensor) -> None:
    found = apply(logits, {1: ruled(presence_penalty=1.0, logit_bias_ids=[5], logit_bias=[9.0])})
    assert torch.equal(found[[0, 2]], logits[[0, 2]]) and not torch.equal(found[1], logits[1])
    assert LogitRules(torch.from_numpy).among(np.arange(3)) == []


def test_counts_follow_the_tokens_that_are_sampled(logits: torch.Tensor) -> None:
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.2}
    grown = RuledRow(ruled([], **penalties))
    for token in [*OUTPUT, 49, 49, *range(10, 40)]:
        grown.append(token)
    whole = RuledRow(ruled([*OUTPUT, 49, 49, *range(10, 40)], **penalties))
    counts = [dict(zip(row.seen.tolist(), row.counts.tolist(), strict=True)) for row in (grown, whole)]
    assert counts[0] == counts[1] and counts[0][49] == 2 and counts[0][9] == 0


def test_repetition_penalty_is_transformers(logits: torch.Tensor) -> None:
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([PROMPT + OUTPUT]), logits[:1].clone())
    assert torch.equal(apply(logits[:1], {0: ruled(repetition_penalty=1.7)}), expected)


def test_bad_words_are_transformers(logits: torch.Tensor) -> None:
    """A word of one token never comes; a longer one is not completed, by whatever of it is there."""
    words = [[5], [3, 8], [7, 3, 11], [7, 7, 12], [1, 3, 13]]
    expected = NoBadWordsLogitsProcessor(words)(torch.tensor([OUTPUT]), logits[:1].clone())
    found = apply(logits[:1], {0: ruled(bad_words=words)})
    assert torch.equal(found, expected)
    assert (found[0] == -torch.inf).nonzero().flatten().tolist() == [5, 8, 11]
    row = RuledRow(ruled([], bad_words=words))
    banned = []
    for position, token in enumerate(OUTPUT, len(PROMPT)):
        banned.append(row.banned(position))
        row.append(token)
    assert [*banned, row.banned(9)] == [[5], [5], [5, 12], [5, 8, 11]]


def test_bad_words_give_way_where_nothing_else_is_allowed(logits: torch.Tensor) -> None:
    found = apply(logits[:1], {0: ruled(allowed_token_ids=[5, 6], bad_words=[[5], [6]])})
    assert torch.isfinite(found[0]).nonzero().flatten().tolist() == [5, 6]


def test_min_tokens_bans_every_eos_and_stop_id_until_then(logits: torch.Tensor) -> None:
    """vLLM PR 5849: with several EOS ids the second one still ended an output before its min_tokens."""
    stops = [1, 2, 30]
    for wanted in (len(OUTPUT), len(OUTPUT) + 1):
        processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), wanted, stops, device="cpu")
        expected = processor(torch.tensor([PROMPT + OUTPUT]), logits[:1].clone())
        found = apply(logits[:1], {0: ruled(min_tokens=wanted, stop_ids=stops)})
        assert torch.equal(found, expected)
        assert torch.isinf(found[0, stops]).all() == (wanted > len(OUTPUT))


def test_allowed_ids_and_biases(logits: torch.Tensor) -> None:
    rows = {
        0: ruled(allowed_token_ids=[1, 44], logit_bias_ids=[44, 3], logit_bias=[2.5, 100.0]),
        2: ruled(logit_bias_ids=[0, 49], logit_bias=[-100.0, 1.5]),
    }
    found = apply(logits, rows)
    assert torch.isfinite(found[0]).nonzero().flatten().tolist() == [1, 44]
    assert (found[0, 1], found[0, 44]) == (logits[0, 1], logits[0, 44] + 2.5)
    assert (found[2, 0], found[2, 49]) == (logits[2, 0] - 100, logits[2, 49] + 1.5)


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9])
def test_typical_p_is_transformers(logits: torch.Tensor, mass: float) -> None:
    scaled = logits / 0.7
    expected = TypicalLogitsWarper(mass)(torch.tensor([[0]] * 3), scaled.clone())
    found = apply(logits, {slot: ruled(typical_p=mass) for slot in range(3)}, temperature=0.7)
    assert torch.equal(torch.isinf(found), torch.isinf(expected))
    assert 3 <= torch.isfinite(found).sum() < 3 * VOCAB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rules_applied_while_sampling_draw_as_if_applied_before(dtype: torch.dtype) -> None:
    """The CPU kernels edit a copy of each row; other kernels sample from ``apply``'s. Some rows are greedy."""
    kernels = ops.select(torch.device("cpu"))
    if not kernels.edits_logits:
        pytest.skip("no native CPU kernels")
    every = [
        {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.4},
        {"logit_bias_ids": [2, 9, 4], "logit_bias": [1.5, -3.0, 100.0], "bad_words": [[4], [7, 3, 11]]},
        {"allowed_token_ids": [1, 2, 3, 7, 9], "presence_penalty": 2.0},
        {"min_tokens": 50, "repetition_penalty": 0.7},
        {"allowed_token_ids": [5], "bad_words": [[5]]},
        {},
    ]
    rows = 8 * len(every)
    batch = LogitRules(torch.from_numpy)
    ruled_rows = {slot: ruled(stop_ids=[1, 30], **every[slot % len(every)]) for slot in range(rows) if slot % 6 < 5}
    batch.change(
        plan(new_rows=[NewRow(slot, 0, 0, 1.0, 1.0, 0, 0.0, 0, rules=row) for slot, row in ruled_rows.items()])
    )
    slots, positions = np.arange(rows), np.full(rows, len(PROMPT) + len(OUTPUT))
    temperature = np.where(slots % 4 == 1, 0, 0.9).astype(np.float32)
    logits = (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    before, among = logits.clone(), batch.among(slots)
    how = (
        torch.from_numpy(temperature),
        torch.full((rows,), 20),
        torch.full((rows,), 0.95),
        torch.zeros(rows),
        torch.arange(rows),
        torch.from_numpy(positions),
    )
    edits = batch.edits(rows, among, positions, temperature)
    found = kernels.sample(logits, *how, edits)
    reference = ops.select(torch.device("cpu"), "reference")
    assert found.tolist() == reference.sample(batch.apply(logits, among, positions, temperature), *how).tolist()
    assert torch.equal(logits, before) and not torch.equal(found, reference.sample(logits, *how))
    with pytest.raises(ValueError, match="the reference kernels do not edit logits"):
        reference.sample(logits, *how, edits)


def test_typical_p_is_not_an_edit(logits: torch.Tensor) -> None:
    batch = LogitRules(torch.from_numpy)
    batch.change(plan(new_rows=[NewRow(0, 0, 0, 1.0, 1.0, 0, 0.0, 0, rules=ruled(typical_p=0.5))]))
    among = batch.among(np.arange(1))
    assert batch.edits(1, among, np.array([7]), np.array([1.0], dtype=np.float32)) is None


@pytest.mark.parametrize(
    ("rules", "filters"),
    [
        ({}, {}),
        ({"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.4}, {"temperature": 0.8}),
        ({"logit_bias_ids": [2, 9], "logit_bias": [1.5, -3.0], "bad_words": [[4]]}, {"top_p": 0.8}),
        ({"allowed_token_ids": [1, 2, 3, 7, 9]}, {"top_k": 4}),
        ({"typical_p": 0.6}, {"temperature": 1.3}),
        ({"presence_penalty": -1.0}, {"min_p": 0.1}),
        ({}, {"temperature": 0.6}),
        ({}, {"top_k": 5}),
        ({}, {"top_p": 0.7}),
        ({}, {"min_p": 0.2}),
        ({}, {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.05}),
        ({"frequency_penalty": 1.2}, {}),
        ({"repetition_penalty": 0.7}, {"top_p": 0.9}),
        ({"min_tokens": 9, "stop_ids": [6, 7]}, {}),
        (
            {
                "allowed_token_ids": [0, 1, 2, 3, 4, 5, 7, 9, 11],
                "bad_words": [[0]],
                "min_tokens": 9,
                "stop_ids": [1],
                "logit_bias_ids": [2, 9],
                "logit_bias": [1.5, -1.0],
                "repetition_penalty": 1.3,
                "frequency_penalty": 0.2,
                "presence_penalty": 0.1,
                "typical_p": 0.95,
            },
            {"temperature": 1.2, "top_k": 6, "top_p": 0.95, "min_p": 0.02},
        ),
    ],
    ids=[
        "plain",
        "penalties",
        "bias and bad words",
        "allowed",
        "typical",
        "min_p",
        "temperature alone",
        "top_k alone",
        "top_p alone",
        "min_p alone",
        "all filters",
        "frequency alone",
        "repetition below 1",
        "min_tokens",
        "everything",
    ],
)
def test_what_is_sampled_has_the_distribution_of_a_float64_reference(
    rules: dict[str, Any], filters: dict[str, float]
) -> None:
    """Chi-square over 100,000 draws of one row at other positions; p > 1e-4 by the bound of Wilson and Hilferty."""
    draws, vocabulary = 100_000, 12
    logits = torch.linspace(-2, 2, vocabulary).roll(5)[None]
    ruled_logits = apply(logits, {0: ruled(**rules)}, filters.get("temperature", 1.0)) if rules else logits
    temperature, top_k = filters.get("temperature", 1.0), int(filters.get("top_k", 0))
    sample = ops.select(torch.device("cpu"), "reference").sample
    ids = sample(
        ruled_logits.expand(draws, -1),
        torch.full((draws,), temperature),
        torch.full((draws,), top_k),
        torch.full((draws,), filters.get("top_p", 1.0)),
        torch.full((draws,), filters.get("min_p", 0.0)),
        torch.full((draws,), 11),
        torch.arange(draws),
    )
    plain = {name: value for name, value in rules.items() if name != "stop_ids"}
    expected = reference(logits[0].double().numpy(), sampling.LogitRules(**plain), rules.get("stop_ids", []), filters)
    counts = np.bincount(ids.numpy(), minlength=vocabulary)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - draws * expected)[possible] ** 2 / (draws * expected[possible])).sum()
    freedom = possible.sum() - 1
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.72 * spread**0.5) ** 3


def reference(logits: Any, rules: sampling.LogitRules, banned: list[int], filters: dict[str, float]) -> Any:
    """Probabilities after all rules and filters, written down in the order in which they apply."""
    x = logits.copy()
    if rules.allowed_token_ids:
        x[[i for i in range(len(x)) if i not in rules.allowed_token_ids]] = -np.inf
    x[[*banned, *(word[0] for word in rules.bad_words)]] = -np.inf
    for id, bias in zip(rules.logit_bias_ids, rules.logit_bias, strict=True):
        x[id] += bias
    for id in {*PROMPT, *OUTPUT}:
        x[id] = x[id] / rules.repetition_penalty if x[id] > 0 else x[id] * rules.repetition_penalty
        times = OUTPUT.count(id)
        x[id] -= rules.frequency_penalty * times + rules.presence_penalty * (times > 0)
    p = np.exp(x / filters.get("temperature", 1.0))
    p /= p.sum()
    if rules.typical_p < 1:
        possible = p > 0
        surprise = np.full(len(p), np.inf)
        surprise[possible] = -np.log(p[possible])
        order = np.argsort(np.abs(surprise - (p[possible] * surprise[possible]).sum()))
        kept = order[: np.searchsorted(p[order].cumsum(), rules.typical_p) + 1]
        p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
    p[p < p.max() * filters.get("min_p", 0.0)] = 0
    order = np.argsort(-p)
    if "top_k" in filters:
        p[order[int(filters["top_k"]) :]] = 0
    p /= p.sum()
    if "top_p" in filters:
        p[order[np.searchsorted(p[order].cumsum(), filters["top_p"]) + 1 :]] = 0
    return p / p.sum()
