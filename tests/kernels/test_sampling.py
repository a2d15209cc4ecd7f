"""Sampling: the distribution against float64 softmax, independence of the batch, and each filter by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.ops import select

ops = select(torch.device("cpu"), "reference")

VOCABULARY = 24


def draw(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = len(logits)
    zeros = torch.zeros(rows, dtype=torch.int64)
    return ops.sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        zeros if seeds is None else seeds,
        zeros if positions is None else positions,
    )


def allowed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The probabilities to draw from, in float64 and one token at a time."""
    probabilities = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(logits)), key=lambda token: -float(probabilities[token]))
    order = [token for token in order if probabilities[token] >= min_p * probabilities[order[0]]]
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(float(probabilities[token]) for token in order), 0.0, []
    for token in order:
        kept.append(token)
        mass += float(probabilities[token]) / total
        if mass >= top_p:
            break
    mask = torch.zeros(len(logits), dtype=torch.float64)
    mask[kept] = 1
    return probabilities * mask / (probabilities * mask).sum()


@pytest.mark.parametrize("keyed_by", ["seed", "position"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.5, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.2, 10, 0.9, 0.02),
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float, keyed_by: str) -> None:
    draws = 20_000
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2
    keys = torch.arange(draws)
    ids = draw(
        logits.expand(draws, -1),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=keys if keyed_by == "seed" else torch.full((draws,), 3),
        positions=keys if keyed_by == "position" else torch.full((draws,), 3),
    )
    expected = allowed(logits, temperature, top_k, top_p, min_p) * draws
    observed = torch.bincount(ids, minlength=VOCABULARY).double()
    assert (observed[expected == 0] == 0).all()
    usual = expected >= 5
    statistic = float(((observed - expected)[usual].square() / expected[usual]).sum())
    freedom = max(1, int(usual.sum()) - 1)
    # chi-square is about normal in its cube root (Wilson and Hilferty); 4.5 standard deviations
    limit = freedom * (1 - 2 / (9 * freedom) + 4.5 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_a_row_samples_the_same_wherever_it_stands() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(40, 1000, generator=generator)
    seeds = torch.randint(0, 1 << 62, (40,), generator=generator)
    positions = torch.randint(0, 8192, (40,), generator=generator)
    for filters in ({}, {"top_p": 0.9, "top_k": 50}):
        together = draw(logits, seeds=seeds, positions=positions, **filters)
        order = torch.randperm(40, generator=generator)
        shuffled = draw(logits[order], seeds=seeds[order], positions=positions[order], **filters)
        assert torch.equal(shuffled, together[order])
        for row in range(0, 40, 7):
            one = slice(row, row + 1)
            assert torch.equal(draw(logits[one], seeds=seeds[one], positions=positions[one], **filters), together[one])
        assert len(set(together.tolist())) > 20  # the rows are not all alike


def test_greedy_rows_beside_sampled_ones() -> None:
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(7))
    temperature = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    ids = ops.sample(
        logits,
        temperature,
        torch.zeros(6, dtype=torch.int64),
        torch.ones(6),
        torch.zeros(6),
        torch.arange(6),
        torch.arange(6),
    )
    assert torch.equal(ids[::2], logits.argmax(-1)[::2])
    mixed = draw(logits[1::2], seeds=torch.tensor([1, 3, 5]), positions=torch.tensor([1, 3, 5]))
    assert torch.equal(ids[1::2], mixed)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_filters_at_their_ends_are_greedy(filters: dict[str, float]) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(8))
    assert torch.equal(draw(logits, seeds=torch.arange(50), **filters), logits.argmax(-1))  # type: ignore[arg-type]


def test_sampling_from_bfloat16_logits() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(9)).bfloat16()
    seeds = torch.arange(50)
    assert torch.equal(draw(logits, seeds=seeds), draw(logits.float(), seeds=seeds))
