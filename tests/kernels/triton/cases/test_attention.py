"""Attention where Triton's kernels have limits of their own; all else is in ``tests/kernels/test_attention.py``."""

from __future__ import annotations

import pytest
import torch

import kernels.triton as kernels
from kernels.errors import UnavailableError
from kernels.triton.attention import MAX_SPLITS, MIN_SPLIT_TOKENS
from tests.kernels.oracle import assert_close, decoded, paged, queries


def test_decode_of_more_pieces_than_there_are_places(device: torch.device) -> None:
    """Pieces grow with a sequence that is longer than MAX_SPLITS of the shortest."""
    lengths = [MAX_SPLITS * MIN_SPLIT_TOKENS, MAX_SPLITS * MIN_SPLIT_TOKENS + 1]
    memory = paged(lengths, 1, 16, 128, torch.float32)
    q = queries(2, 1, 16, torch.float32)
    tensors = (x.to(device) for x in (q, memory.kv, memory.block_table, memory.seq_lens))
    assert_close(kernels.paged_decode(*tensors, 0.25, 0, 0.0).cpu(), decoded(q, memory))


def test_heads_smaller_than_a_tensor_core_takes(device: torch.device) -> None:
    memory = paged([1, 17, 130], 2, 8, 16, torch.float32)
    q = queries(3, 4, 8, torch.float32)
    tensors = (x.to(device) for x in (q, memory.kv, memory.block_table, memory.seq_lens))
    assert_close(kernels.paged_decode(*tensors, 8**-0.5, 0, 0.0).cpu(), decoded(q, memory))


def test_shapes_that_the_kernels_do_not_take_are_named() -> None:
    kernels.check_kv(128, 256)
    with pytest.raises(UnavailableError, match="block size 8: these kernels take 16, 32, 64 or 128"):
        kernels.check_kv(8, 64)
    with pytest.raises(UnavailableError, match="heads of 288 elements: these kernels take up to 256"):
        kernels.check_kv(16, 288)
