"""KV memory of one rank: what a block takes, how many blocks there are, and the tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.errors import UnavailableError
from kernels.kv import SCALE_BYTES, layer_shape, scale_elements
from kernels.ops import Kernels
from services.worker.config import WorkerConfig
from services.worker.device import Device
from services.worker.models.config import ModelConfig
from shared.errors import ConfigError


@dataclass(frozen=True)
class KvForm:
    """A tensor of ``kernels.kv.layer_shape`` for each layer. dtype: of what is stored, int8 where it is rounded."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def build(cls, config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, kernels: Kernels) -> KvForm:
        """dtype: of the model. Raises ConfigError when the kernels do not run over such memory."""
        try:
            kernels.check_kv(config.block_size, model.head_dim)
        except UnavailableError as error:
            raise ConfigError(f"the {kernels.name} kernels do not run this: {error}") from error
        if config.kv_cache_dtype == "int8":
            if kernels.name == "triton":
                raise ConfigError("--kv-cache-dtype int8 runs on CPUs only, not with the Triton kernels")
            if model.head_dim % SCALE_BYTES:
                raise ConfigError(
                    f"--kv-cache-dtype int8 needs a head size that is a multiple of {SCALE_BYTES}; the model's is "
                    f"{model.head_dim}"
                )
            dtype = torch.int8
        return cls(model.num_layers, model.num_kv_heads, model.head_dim, config.block_size, dtype)

    @property
    def bytes_per_token(self) -> int:
        row = (self.head_dim + scale_elements(self.dtype)) * self.dtype.itemsize
        return 2 * self.kv_heads * row * self.layers

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def num_blocks(self, budget: int, sequences: int, max_model_len: int) -> int:
        """Blocks, the padding included: what ``budget`` bytes hold and full-length sequences can use."""
        usable = sequences * -(-max_model_len // self.block_size)
        blocks = min(max(budget, 0) // self.bytes_per_block, usable + 1)
        if blocks < 2:
            raise ConfigError(
                f"no memory for KV: a block of {self.block_size} tokens takes {self.bytes_per_block} bytes, two are "
                f"needed (one is padding), and there are {max(budget, 0)} bytes"
            )
        return blocks

    def allocate(self, device: Device, num_blocks: int) -> list[torch.Tensor]:
        """A tensor a layer. Only block 0 is cleared: the rest is written before it is read. Raises ConfigError."""
        shape = layer_shape(num_blocks, self.kv_heads, self.block_size, self.head_dim, self.dtype)
        try:
            kv = [device.memory(shape, self.dtype) for _ in range(self.layers)]
        except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise ConfigError(f"no memory for {num_blocks} KV blocks of {self.block_size} tokens") from error
        for layer in kv:
            layer[0].zero_()
        return kv
