"""KV of preempted requests in the host's memory: the first tier below the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostMemory:
    """``num_blocks`` blocks laid out as on the device: a tensor a layer, pinned where a GPU copies from it."""

    def __init__(self, kvs: Sequence[torch.Tensor], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        pinned = kvs[0].device.type == "cuda"
        shape = (num_blocks, *kvs[0].shape[1:])
        self._layers = [torch.empty(shape, dtype=kv.dtype, pin_memory=pinned) for kv in kvs] if num_blocks else []

    def swap_out(self, kvs: Sequence[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies blocks ``sources`` of every layer to the host's ``destinations`` (both [P] int64 on the CPU)."""
        for kv, host in zip(kvs, self._layers, strict=True):
            host.index_copy_(0, destinations, kv.index_select(0, sources.to(kv.device)).cpu())

    def swap_in(self, kvs: Sequence[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies host blocks ``sources`` to blocks ``destinations`` of every layer (both [P] int64 on the CPU)."""
        for kv, host in zip(kvs, self._layers, strict=True):
            kv.index_copy_(0, destinations.to(kv.device), host.index_select(0, sources).to(kv.device))
