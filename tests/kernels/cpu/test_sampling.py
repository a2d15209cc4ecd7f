"""Sampling: token for token what the reference draws, filters against counts by hand, and rows that are no rows."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import reference
from kernels.cpu.kernels import CpuKernels

Settings = tuple[torch.Tensor, ...]
VOCABULARIES = (1, 7, 300, 4097, 49152)


def settings(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    position: int = 11,
) -> Settings:
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.arange(rows) * 7919,
        torch.full((rows,), position),
    )


def assert_draws_of_the_reference(kernels: CpuKernels, logits: torch.Tensor, chosen: Settings) -> None:
    assert kernels.sample(logits, *chosen).tolist() == reference.sample(logits, *chosen).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_mixed_rows_draw_what_the_reference_draws(kernels: CpuKernels, vocabulary: int, dtype: torch.dtype) -> None:
    """All combinations of filters in one batch; logits of two bytes have many ties."""
    combinations = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.3, 1.0, 4.0)
        for top_k in (0, 1, 40, 3000)
        for top_p in (1.0, 0.95, 0.5)
        for min_p in (0.0, 0.05)
    ]
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(len(combinations), vocabulary, generator=generator) * 3).to(dtype)
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*combinations, strict=True))
    seeds = torch.randint(0, 1 << 62, (len(combinations),), generator=generator)
    positions = torch.randint(0, 5000, (len(combinations),), generator=generator)
    assert_draws_of_the_reference(kernels, logits, (temperature, top_k, top_p, min_p, seeds, positions))


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02}, {"top_k": 100, "top_p": 0.8, "temperature": 1.5}]
)
def test_many_draws_from_one_row_are_those_of_the_reference(kernels: CpuKernels, filters: dict[str, float]) -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(6)).repeat(3000, 1) * 2
    assert_draws_of_the_reference(kernels, logits, settings(3000, **filters))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "logits",
    [
        torch.linspace(-9, 9, 20000),
        torch.linspace(0, 1e-3, 20000),  # nearly flat: every level holds most tokens
        torch.zeros(20000),  # ties only
        torch.linspace(-3000, 0, 20000),  # the first levels reach a few of them
        torch.cat([torch.full((20000,), float("-inf")), torch.linspace(0, 5, 50)]),
        torch.cat([torch.full((20000,), torch.finfo(torch.float32).min), torch.linspace(0, 5, 500)]),
    ],
    ids=["even", "nearly flat", "flat", "wide", "banned", "masked with the least number"],
)
@pytest.mark.parametrize("filters", [{"top_k": 700}, {"top_p": 0.37}, {"top_p": 0.99}, {"top_k": 9000, "top_p": 0.9}])
def test_prefixes_of_all_forms_of_distributions(
    kernels: CpuKernels, logits: torch.Tensor, filters: dict[str, float]
) -> None:
    shuffled = logits[torch.randperm(len(logits), generator=torch.Generator().manual_seed(1))]
    assert_draws_of_the_reference(kernels, shuffled.repeat(12, 1), settings(12, **filters))  # type: ignore[arg-type]


def drawn(kernels: CpuKernels, logits: list[float], **filters: float) -> set[int]:
    """The tokens that 2,000 draws come upon."""
    return set(kernels.sample(torch.tensor(logits).repeat(2000, 1), *settings(2000, **filters)).tolist())  # type: ignore[arg-type]


def test_filters_keep_what_a_hand_count_keeps(kernels: CpuKernels) -> None:
    logits = [math.log(x) for x in (0.4, 0.05, 0.3, 0.15, 0.1)]
    assert drawn(kernels, logits) == {0, 1, 2, 3, 4}
    assert drawn(kernels, logits, top_k=2) == {0, 2}
    assert drawn(kernels, logits, top_p=0.69) == {0, 2}
    assert drawn(kernels, logits, top_p=0.71) == {0, 2, 3}
    assert drawn(kernels, logits, top_p=0.01) == {0}
    assert drawn(kernels, logits, min_p=0.3) == {0, 2, 3}
    assert drawn(kernels, logits, top_k=4, top_p=0.88) == {0, 2, 3}  # of 0.95 that is left, 0.836
    assert drawn(kernels, logits, top_k=4, top_p=0.91) == {0, 2, 3, 4}
    assert drawn(kernels, logits, top_k=3, min_p=0.5) == {0, 2}


def test_of_equal_tokens_at_the_cut_off_the_first_stay(kernels: CpuKernels) -> None:
    assert drawn(kernels, [1.0, 0.0, 1.0, 1.0, 1.0], top_k=3) == {0, 2, 3}
    assert drawn(kernels, [0.0, 0.0, 0.0, 0.0], top_p=0.6) == {0, 1, 2}
    assert drawn(kernels, [0.0, 0.0, 0.0, 0.0], top_k=2, top_p=0.6) == {0, 1}


def test_banned_tokens_are_never_drawn(kernels: CpuKernels) -> None:
    logits = [float("-inf"), 0.0, float("-inf"), -1.0]
    for filters in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}, {"temperature": 50.0}):
        assert drawn(kernels, logits, **filters) == {1, 3}


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_filters_at_their_ends_are_greedy(kernels: CpuKernels, filters: dict[str, float]) -> None:
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(8))
    assert torch.equal(kernels.sample(logits, *settings(50, **filters)), logits.argmax(-1))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_logits_that_are_not_numbers_still_give_a_token(
    kernels: CpuKernels, temperature: float, filters: dict[str, float]
) -> None:
    logits = torch.full((4, 1000), float("nan"))
    logits[1, 3] = 1.0
    logits[2] = float("-inf")
    logits[3, 5:7] = float("inf")
    ids = kernels.sample(logits, *settings(4, temperature=temperature, **filters)).tolist()  # type: ignore[arg-type]
    assert 0 <= ids[0] < 1000 and ids[1] == 3 and 0 <= ids[2] < 1000 and ids[3] in (5, 6)
    assert 0 <= kernels.argmax(logits)[0] < 1000


def test_a_row_draws_the_same_in_any_batch_and_of_wider_rows(kernels: CpuKernels) -> None:
    wide = torch.randn(6, 720, generator=torch.Generator().manual_seed(2))
    logits, chosen = wide[:, :700], settings(6, top_k=40, top_p=0.9)
    together = kernels.sample(logits, *chosen)
    for row in range(6):
        one = slice(row, row + 1)
        assert kernels.sample(logits[one].clone(), *(values[one] for values in chosen)).item() == together[row].item()


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(kernels: CpuKernels, rows: int) -> None:
    assert kernels.sample(torch.zeros(rows, 10), *settings(rows)).shape == (rows,)
