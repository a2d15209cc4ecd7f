"""Sampling against counts made by hand, and draw for draw against the reference."""

from __future__ import annotations

import math

import pytest
import torch

import kernels.triton as kernels
from kernels import reference

Rows = tuple[torch.Tensor, ...]


def settings(
    rows: int,
    device: torch.device,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first_seed: int = 0,
) -> Rows:
    return (
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, device=device),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
        torch.arange(first_seed, first_seed + rows, device=device),
        torch.full((rows,), 11, device=device),
    )


def drawn(logits: list[float], device: torch.device, **filters: float) -> set[int]:
    """The tokens that many draws come upon.

    The reference draws with 400 seeds, without the filters and with them; the kernel then has to draw the same with,
    of each, the first seed that gave a token: so with seeds that would give what is filtered out, too.
    """
    cpu = torch.device("cpu")
    batch = torch.tensor(logits).repeat(400, 1)
    free, filtered = settings(400, cpu), settings(400, cpu, **filters)  # type: ignore[arg-type]
    seeds = set()
    for chosen in (free, filtered):
        ids = reference.sample(batch, *chosen).tolist()
        seeds |= {ids.index(token) for token in set(ids)}
    rows = torch.tensor(sorted(seeds))
    got = kernels.sample(batch[rows].to(device), *(values[rows].to(device) for values in filtered)).tolist()
    assert got == reference.sample(batch[rows], *(values[rows] for values in filtered)).tolist()
    return set(got)


def test_greedy_is_the_first_of_the_highest(device: torch.device) -> None:
    logits = torch.zeros(3, 5000, device=device)
    logits[0, [17, 4999]] = 3.0
    logits[1, 4999] = 0.5
    assert kernels.sample(logits, *settings(3, device, temperature=0.0)).tolist() == [17, 4999, 0]


@pytest.mark.parametrize(("vocab", "dtype"), [(4500, torch.bfloat16), (300, torch.float32)])
def test_same_draws_as_the_reference(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Combinations of filters, over a vocabulary that takes two programs a row; bfloat16 logits have ties."""
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(8, vocab, generator=generator) * 3).to(dtype)
    chosen = (
        torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 1.0, 1.0, 2.0]),
        torch.tensor([0, 0, 50, 0, 0, 1, 10000, 20]),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 0.5, 1.0, 0.3, 0.8]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.05]),
        torch.randint(0, 1 << 62, (8,), generator=generator),
        torch.randint(0, 5000, (8,), generator=generator),
    )
    got = kernels.sample(logits.to(device), *(values.to(device) for values in chosen))
    assert got.tolist() == reference.sample(logits, *chosen).tolist()


def test_many_draws_are_those_of_the_reference(device: torch.device) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(6)).repeat(100, 1)
    cpu = torch.device("cpu")
    assert (
        kernels.sample(logits.to(device), *settings(100, device, first_seed=1000)).tolist()
        == reference.sample(logits, *settings(100, cpu, first_seed=1000)).tolist()
    )


def test_filters_keep_what_a_hand_count_keeps(device: torch.device) -> None:
    p = [0.4, 0.05, 0.3, 0.15, 0.1]
    logits = [math.log(x) for x in p]
    assert drawn(logits, device) == {0, 1, 2, 3, 4}
    assert drawn(logits, device, top_k=2) == {0, 2}
    assert drawn(logits, device, top_p=0.69) == {0, 2}
    assert drawn(logits, device, top_p=0.71) == {0, 2, 3}
    assert drawn(logits, device, top_p=0.01) == {0}
    assert drawn(logits, device, min_p=0.3) == {0, 2, 3}
    assert drawn(logits, device, top_k=4, top_p=0.88) == {0, 2, 3}  # of 0.95 that is left, 0.836
    assert drawn(logits, device, top_k=4, top_p=0.91) == {0, 2, 3, 4}
    assert drawn(logits, device, top_k=3, min_p=0.5) == {0, 2}


def test_of_equal_tokens_at_the_cut_off_the_first_stay(device: torch.device) -> None:
    logits = [1.0, 0.0, 1.0, 1.0, 1.0]
    assert drawn(logits, device, top_k=3) == {0, 2, 3}
    assert drawn([0.0, 0.0, 0.0, 0.0], device, top_p=0.6) == {0, 1, 2}
    assert drawn([0.0, 0.0, 0.0, 0.0], device, top_k=2, top_p=0.6) == {0, 1}


def test_masked_tokens_are_never_drawn(device: torch.device) -> None:
    logits = [float("-inf"), 0.0, float("-inf"), -1.0]
    assert drawn(logits, device) == {1, 3}
    assert drawn(logits, device, top_k=3) == {1, 3}
    assert drawn(logits, device, top_p=0.99) == {1, 3}


def test_a_row_draws_the_same_in_any_batch(device: torch.device) -> None:
    logits = torch.randn(6, 700, device=device)
    chosen = settings(6, device, top_k=40, top_p=0.9)
    together = kernels.sample(logits, *chosen)
    for row in range(6):
        one = slice(row, row + 1)
        assert kernels.sample(logits[one], *(values[one] for values in chosen)).item() == together[row].item()


def test_logits_that_are_not_numbers_still_give_a_token(device: torch.device) -> None:
    logits = torch.full((2, 10), float("nan"), device=device)
    logits[1, 3] = 1.0
    for temperature in (0.0, 1.0):
        ids = kernels.sample(logits, *settings(2, device, temperature=temperature)).tolist()
        assert 0 <= ids[0] < 10
        assert ids[1] == 3


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int, device: torch.device) -> None:
    assert kernels.sample(torch.zeros(rows, 10, device=device), *settings(rows, device)).shape == (rows,)
