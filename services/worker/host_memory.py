"""KV of preempted requests in the host's memory: the first tier below the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.worker.device import Device


class HostMemory:
    """``num_blocks`` blocks laid out as those of ``kvs``: a tensor a layer, none where there are no blocks."""

    def __init__(self, device: Device, kvs: Sequence[torch.Tensor], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.layers = [device.host_memory((num_blocks, *kv.shape[1:]), kv.dtype) for kv in kvs] if num_blocks else []
