"""Blocks between memories: device to host and back, beside the computation.

On a device copies go on a stream of their own. It waits for what was queued before, so that a block is copied out
after the stores of earlier steps; what reads a block that is copied in waits for the copies' event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def runs(sources: Sequence[int], destinations: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source, destination, count) of the maximal runs in which both are consecutive."""
    begin = 0
    for i in range(1, len(sources) + 1):
        together = i < len(sources) and sources[i] == sources[i - 1] + 1 and destinations[i] == destinations[i - 1] + 1
        if not together:
            yield sources[begin], destinations[begin], i - begin
            begin = i


def swap_blocks(
    source_kvs: Sequence[torch.Tensor],
    destination_kvs: Sequence[torch.Tensor],
    sources: Sequence[int],
    destinations: Sequence[int],
) -> None:
    """Copies block ``sources[i]`` of every layer of one memory to block ``destinations[i]`` of the other.

    Memories are [num_blocks, 2, K, block_size, D] a layer, on any devices; host memory should be pinned, or copies
    wait for each other. Consecutive blocks go as one copy. Raises ValueError when the lists differ in length.
    """
    if len(sources) != len(destinations) or len(source_kvs) != len(destination_kvs):
        raise ValueError(
            f"{len(sources)} sources in {len(source_kvs)} layers, "
            f"{len(destinations)} destinations in {len(destination_kvs)}"
        )
    for source, destination, count in runs(sources, destinations):
        for source_kv, destination_kv in zip(source_kvs, destination_kvs, strict=True):
            destination_kv[destination : destination + count].copy_(
                source_kv[source : source + count], non_blocking=True
            )


class SwapStream:
    """Swaps between a CUDA device's memory and pinned host memory, on a stream beside the computation's."""

    def __init__(self, device_kvs: Sequence[torch.Tensor], host_kvs: Sequence[torch.Tensor]) -> None:
        self._device_kvs, self._host_kvs = device_kvs, host_kvs
        self._device = device_kvs[0].device
        self._stream = torch.cuda.Stream(self._device)

    def swap_out(self, sources: Sequence[int], destinations: Sequence[int]) -> torch.cuda.Event:
        """Device blocks to host blocks. The step is done, and its blocks are free, only when the event is."""
        return self._swap(self._device_kvs, self._host_kvs, sources, destinations)

    def swap_in(self, sources: Sequence[int], destinations: Sequence[int]) -> torch.cuda.Event:
        """Host blocks to device blocks. ``torch.cuda.current_stream().wait_event`` it before they are read."""
        return self._swap(self._host_kvs, self._device_kvs, sources, destinations)

    def _swap(
        self,
        source_kvs: Sequence[torch.Tensor],
        destination_kvs: Sequence[torch.Tensor],
        sources: Sequence[int],
        destinations: Sequence[int],
    ) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            swap_blocks(source_kvs, destination_kvs, sources, destinations)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event
