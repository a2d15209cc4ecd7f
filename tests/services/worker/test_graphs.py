"""Sizes of CUDA graphs, and what they are expected to take."""

from __future__ import annotations

import pytest

from services.worker.config import WorkerConfig
from services.worker.graphs import capture_sizes, graph_bytes
from shared.config import parse
from shared.errors import ConfigError


def sizes(*argv: str) -> list[int]:
    return capture_sizes(parse(WorkerConfig, argv, {}, prog="worker", about=""))


def test_sizes() -> None:
    assert sizes("--max-num-seqs", "1") == [1]
    assert sizes("--max-num-seqs", "20") == [1, 2, 4, 8, 16, 20]
    assert sizes("--max-num-seqs", "300")[-4:] == [256, 272, 288, 300]
    assert len(sizes()) == 35
    assert sizes("--max-num-seqs", "4096") == sizes("--max-num-seqs", "512")
    assert sizes("--enforce-eager") == []
    assert sizes("--cudagraph-capture-sizes", "8", "2", "8", "--max-num-seqs", "8") == [2, 8]


@pytest.mark.parametrize("size", [0, 9])
def test_a_size_that_no_step_has(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"--cudagraph-capture-sizes {size} is outside 1..8, which --max-num-seqs"):
        sizes("--cudagraph-capture-sizes", str(size), "--max-num-seqs", "8")


def test_smaller_graphs_add_what_the_second_largest_adds() -> None:
    assert graph_bytes([100, 103], 35) == 100 + 34 * 3
    assert graph_bytes([100, 100], 1) == 100  # there is no second
    assert graph_bytes([100, 90], 3) == 100
