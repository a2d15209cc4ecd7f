"""Decode steps as CUDA graphs: which sizes, what they take, and the steps themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.decoder import Batch
from services.worker.config import WorkerConfig
from services.worker.models.decoder import Decoder
from shared.errors import ConfigError

LARGEST = 512
"""Rows of the largest graph by default: beyond it a step computes longer than its launches take."""


class Graphs(Protocol):
    """``kernels.triton.graphs.DecodeGraphs``, once captured."""

    def fits(self, rows: int) -> bool: ...

    def run(self, batch: Batch) -> torch.Tensor: ...


class GraphedSteps:
    """A ``FusedDecoder`` whose steps of decode rows alone are replays, and all others the decoder's operations."""

    def __init__(self, decoder: Decoder, graphs: Graphs) -> None:
        self._decoder, self._graphs = decoder, graphs

    def takes(self, kv: torch.Tensor) -> bool:
        return True

    def __call__(
        self,
        batch: Batch,
        kv: Sequence[torch.Tensor],
        samples: torch.Tensor,
        likeliest: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """kv: the memory that the graphs were captured with. Decode rows sample each, in their order."""
        rows = len(batch.decode_lens)
        if rows == len(batch.tokens) and self._graphs.fits(rows):
            hidden = self._graphs.run(batch)
        else:
            hidden = self._decoder.forward(batch, list(kv))[samples]
        logits = self._decoder.logits(hidden)
        if likeliest is not None:
            torch.argmax(logits, dim=-1, out=likeliest)
        return logits, {}


def capture_sizes(config: WorkerConfig) -> list[int]:
    """Ascending, as asked; else 1, 2, 4, then every 8, from 256 on every 16 rows, up to the most rows a step can have
    or LARGEST. Padding wastes little. None with --enforce-eager. Raises ConfigError for a size that no step has."""
    if config.enforce_eager:
        return []
    most = config.max_num_seqs
    for size in config.cudagraph_capture_sizes:
        if not 1 <= size <= most:
            raise ConfigError(f"--cudagraph-capture-sizes {size} is outside 1..{most}, which --max-num-seqs allows")
    if config.cudagraph_capture_sizes:
        return sorted(set(config.cudagraph_capture_sizes))
    most = min(most, LARGEST)
    return sorted(size for size in {1, 2, 4, *range(8, 256, 8), *range(256, most, 16), most} if size <= most)


def graph_bytes(taken: Sequence[int], count: int) -> int:
    """Bytes of ``count`` graphs, when the largest alone takes taken[0] and the two largest together taken[1]: smaller
    ones live in the memory of the largest and add what the driver keeps for each."""
    return taken[0] + (count - 1) * max(0, taken[1] - taken[0])
