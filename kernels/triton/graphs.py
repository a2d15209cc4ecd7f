"""CUDA graphs of decode steps: one replay in place of the hundreds of launches of a forward pass.

A graph reads fixed addresses and has a fixed number of rows. So inputs are copied into static buffers, and a batch
takes the graph of the next size up, its last rows being padding: token 0 at position 0 of a sequence of length 0 in
block 0, stored nowhere. Grids depend on sizes and table widths only, never on values, so one graph serves all lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """n rows of one token each.

    tokens, positions, slot_mapping: [n] int64. block_table: [n, blocks] int32. seq_lens: [n] int32, the row's new token
    included.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Ascending: 1, 2, 4, then every 8, from 256 on every 16 rows, and max_num_seqs itself. Padding wastes little."""
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeBuffers:
    """Static inputs for up to ``rows`` rows whose tables have up to ``blocks`` entries."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self._all = DecodeInputs(
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
            block_table=torch.zeros(rows, blocks, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(rows, dtype=torch.int32, device=device),
        )

    def first(self, rows: int) -> DecodeInputs:
        """Views of the first rows: the same addresses at every call."""
        return DecodeInputs(*(getattr(self._all, field.name)[:rows] for field in fields(DecodeInputs)))

    def load(self, inputs: DecodeInputs, rows: int) -> None:
        """Copies ``inputs`` in and makes padding of what is left up to ``rows``.

        Table entries beyond the width of ``inputs`` keep what was there: lengths say that they are not read.
        """
        count, width = inputs.block_table.shape
        static = self._all
        for name in ("tokens", "positions", "slot_mapping", "seq_lens"):
            getattr(static, name)[:count].copy_(getattr(inputs, name), non_blocking=True)
        static.block_table[:count, :width].copy_(inputs.block_table, non_blocking=True)
        if count < rows:
            static.tokens[count:rows].zero_()
            static.positions[count:rows].zero_()
            static.slot_mapping[count:rows].fill_(-1)
            static.block_table[count:rows].zero_()
            static.seq_lens[count:rows].zero_()


class DecodeGraphs:
    """``forward`` captured for every size of ``sizes``; needs CUDA (or ROCm).

    forward maps DecodeInputs of n rows to a tensor [n, ...] and reads no value on the host. Captured under the caller's
    inference mode. Steps with anything but decode rows, or with more rows than the largest size, run without graphs.
    """

    def __init__(
        self,
        forward: Callable[[DecodeInputs], torch.Tensor],
        sizes: Sequence[int],
        max_blocks: int,
        device: torch.device,
    ) -> None:
        if not sizes:
            raise ValueError("sizes is empty: there is nothing to capture")
        self._forward = forward
        self._sizes = sorted(sizes)
        self._buffers = DecodeBuffers(self._sizes[-1], max_blocks, device)
        self._device = device
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self) -> None:
        """Largest first: smaller graphs then fit into the memory that the largest has taken from the shared pool."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            inputs = self._buffers.first(size)
            side = torch.cuda.Stream(self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):  # libraries make their workspaces in the first call, outside the graph
                self._forward(inputs)
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = self._forward(inputs)
            self._graphs[size] = graph, output

    def fits(self, rows: int) -> bool:
        return 0 < rows <= self._sizes[-1]

    def run(self, inputs: DecodeInputs) -> torch.Tensor:
        """The forward of ``inputs``, [n, ...]: a view of static memory, good until the next run."""
        rows = len(inputs.tokens)
        size = self._sizes[bisect_left(self._sizes, rows)]
        self._buffers.load(inputs, size)
        graph, output = self._graphs[size]
        graph.replay()
        return output[:rows]
