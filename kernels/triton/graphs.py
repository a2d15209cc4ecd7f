"""CUDA graphs of decode steps: one replay in place of the hundreds of launches of a forward pass.

A graph reads fixed addresses and has a fixed number of rows. So inputs are copied into static buffers, and a batch
takes the graph of the next size up, its last rows being padding: a sequence of length 0 in block 0, stored nowhere.
Grids depend on sizes and table widths only, never on values, so one graph serves all lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from kernels.decoder import Batch


class DecodeBuffers:
    """Static inputs for up to ``rows`` decode rows whose tables have up to ``blocks`` entries."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self._tokens, self._positions = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self._lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._no_bounds = torch.zeros(1, dtype=torch.int32, device=device)

    def first(self, rows: int) -> Batch:
        """Views of the first rows: the same addresses at every call."""
        return Batch(
            tokens=self._tokens[:rows],
            positions=self._positions[:rows],
            slot_mapping=self._slot_mapping[:rows],
            decode_tables=self._tables[:rows],
            decode_lens=self._lens[:rows],
            chunk_tables=self._tables[:0],
            chunk_cu_seqlens=self._no_bounds,
            chunk_lens=self._lens[:0],
        )

    def load(self, batch: Batch, rows: int) -> None:
        """Copies a batch of decode rows in and makes padding of what is left up to ``rows``.

        What tokens, positions and tables held before stays in the padding and beyond the width of the batch's tables:
        tokens and positions are still ones that exist, and lengths say that tables are not read there.
        """
        count, width = batch.decode_tables.shape
        self._tokens[:count].copy_(batch.tokens)
        self._positions[:count].copy_(batch.positions)
        self._slot_mapping[:count].copy_(batch.slot_mapping)
        self._tables[:count, :width].copy_(batch.decode_tables)
        self._lens[:count].copy_(batch.decode_lens)
        if count < rows:
            self._slot_mapping[count:rows].fill_(-1)
            self._lens[count:rows].zero_()


class DecodeGraphs:
    """``forward`` captured for every size of ``sizes``; needs CUDA (or ROCm).

    forward maps a Batch of n decode rows to a tensor [n, ...] and reads no value on the host. Captured and run under
    the caller's inference mode, on one device stream. Steps with anything but decode rows, or with more rows than the
    largest size, run without graphs.
    """

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
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
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Largest first: smaller graphs then fit into the memory that the largest has taken from the shared pool.

        Each size runs once before it is captured, on the stream it is captured on: kernels are compiled and loaded
        then, and libraries make the workspaces of that stream outside the graphs. Graphs write their results to one
        tensor that is made here, or each would keep its own.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        for size in reversed(self._sizes):
            batch = self._buffers.first(size)
            with torch.cuda.stream(stream):
                result = self._forward(batch)
                if size == self._sizes[-1]:
                    self._result = torch.empty_like(result)
                del result
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._result[:size].copy_(self._forward(batch))
            self._graphs[size] = graph
        current.wait_stream(stream)

    def fits(self, rows: int) -> bool:
        return 0 < rows <= self._sizes[-1]

    def run(self, batch: Batch) -> torch.Tensor:
        """The forward of a batch of decode rows, [n, ...]: a view of static memory, good until the next run."""
        rows = len(batch.tokens)
        size = self._sizes[bisect_left(self._sizes, rows)]
        self._buffers.load(batch, size)
        self._graphs[size].replay()
        return self._result[:rows]
