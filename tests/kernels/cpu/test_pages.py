"""Memory in huge pages: pieces that do not overlap, and mappings that go with the last of them."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.cpu.pages import HUGE, Pages, empty, populate
from tests.kernels.cpu.mapped import resident


def test_pieces_are_aligned_and_apart() -> None:
    pages = Pages()
    pieces = [pages.take(size) for size in (1, 64, 1000, 3 * HUGE, 100, 40 * HUGE, 5)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    assert [set(piece[:: max(1, len(piece) // 999)].tolist()) for piece in pieces] == [{n} for n in range(len(pieces))]
    assert [len(piece) for piece in pieces] == [1, 64, 1000, 3 * HUGE, 100, 40 * HUGE, 5]


def test_the_mapping_asks_for_huge_pages_and_ends_with_its_tensor() -> None:
    tensor = empty((3, 1 << 20), torch.bfloat16)
    address = tensor.data_ptr()
    assert address % HUGE == 0 and tensor.shape == (3, 1 << 20)
    assert "hg" in _flags(address)
    part = tensor[1]
    del tensor
    assert "hg" in _flags(address)
    part.fill_(1)
    del part
    assert "hg" not in _flags(address)


def test_populated_memory_is_there_before_it_is_written_to() -> None:
    layers = empty((4, HUGE), torch.uint8)
    layers[1, HUGE // 2] = 7
    assert populate(layers[1:3])
    assert 2 * HUGE <= resident(layers) < 4 * HUGE
    assert layers[1, HUGE // 2] == 7


def _flags(address: int) -> list[str]:
    """VmFlags of the mapping that holds ``address``; none where nothing is mapped."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []
