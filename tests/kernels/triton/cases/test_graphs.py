"""What a captured decode step reads: padding that neither stores nor attends. Capture itself needs a GPU."""

from __future__ import annotations

import pytest
import torch

import kernels.triton as kernels
from kernels.decoder import Batch
from kernels.triton.graphs import DecodeBuffers, DecodeGraphs
from tests.kernels.oracle import paged, queries


def step(lengths: list[int], device: torch.device) -> tuple[torch.Tensor, Batch]:
    memory = paged(lengths, 1, 64, 16, torch.float32)
    lens = memory.seq_lens.to(device)
    table = memory.block_table.to(device)
    last = (lens - 1).long()
    slots = table.gather(1, last[:, None] // 16).squeeze(1).long() * 16 + last % 16
    return memory.kv.to(device), batch(torch.zeros_like(slots), last, slots, table, lens)


def batch(
    tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, table: torch.Tensor, lens: torch.Tensor
) -> Batch:
    return Batch(tokens, positions, slots, table, lens, table[:0], torch.zeros_like(lens[:1]), lens[:0])


def forward(inputs: Batch, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """One layer's store and attention."""
    rows = q[: len(inputs.tokens)]
    kernels.store_kv(rows[:, :1], rows[:, 1:], kv, inputs.slot_mapping)
    return kernels.paged_decode(rows, kv, inputs.decode_tables, inputs.decode_lens, 0.125, 0, 0.0)


def test_padding_stores_nothing_and_gives_zeros(device: torch.device) -> None:
    """vllm #37815: padding of a graph must not come out as NaN."""
    kv, inputs = step([5, 17, 40], device)
    q = queries(8, 2, 64, torch.float32).to(device)
    eager_kv = kv.clone()
    eager = forward(inputs, q, eager_kv)

    buffers = DecodeBuffers(8, inputs.decode_tables.shape[1] + 3, device)
    longer = step([30, 31, 32, 33, 34, 35, 36, 37], device)[1]
    buffers.load(longer, 8)  # a larger batch was there before
    buffers.load(inputs, 4)
    padded = forward(buffers.first(4), q, kv)
    assert torch.equal(padded[:3], eager)
    assert (padded[3] == 0).all()
    assert torch.equal(kv.nan_to_num(7.0), eager_kv.nan_to_num(7.0))
    assert (kv[0] == 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_equal_eager_steps(device: torch.device) -> None:
    q = queries(8, 2, 64, torch.float32).to(device)
    kv, inputs = step([5, 17, 40], device)
    kv[1:] = kv[1:].nan_to_num(0.0)
    graphs = DecodeGraphs(lambda static: forward(static, q, kv), [1, 4, 8], inputs.decode_tables.shape[1] + 3, device)
    graphs.capture()
    for rows in (3, 1, 2):
        part = batch(
            inputs.tokens[:rows], inputs.positions[:rows], inputs.slot_mapping[:rows],
            inputs.decode_tables[:rows], inputs.decode_lens[:rows],
        )  # fmt: skip
        assert torch.equal(graphs.run(part), forward(part, q, kv))
