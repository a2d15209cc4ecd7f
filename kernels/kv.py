"""The form of KV memory: one tensor a layer, ``[num_blocks, 2, kv_heads, block_size, row]``.

A row is one token's key or value of one head: ``head_dim`` elements of the model's dtype. Or, in int8, ``head_dim``
bytes and a float32 scale behind them: the row rounded to multiples of the scale, its largest element being 127 of
them. Either way a block of a layer is one contiguous piece.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4


def layer_shape(num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of the tensor of one layer. Raises ValueError where int8 rows would not keep their scales aligned."""
    if dtype == torch.int8 and head_dim % SCALE_BYTES:
        raise ValueError(f"head_dim is {head_dim}; int8 rows need a multiple of {SCALE_BYTES}")
    return (num_blocks, 2, kv_heads, block_size, head_dim + scale_elements(dtype))


def scale_elements(dtype: torch.dtype) -> int:
    """Elements of a row that are its scale."""
    return SCALE_BYTES if dtype == torch.int8 else 0


def head_dim(kv: torch.Tensor) -> int:
    return kv.shape[4] - scale_elements(kv.dtype)


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Rows ``x [..., head_dim]`` as int8 memory keeps them, [..., head_dim + 4] int8."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    whole = (x.float() / torch.where(scale > 0, scale, 1)).round().clamp(-127, 127)
    return torch.cat([whole.to(torch.int8), scale.view(torch.int8)], dim=-1)


def dequantized(rows: torch.Tensor) -> torch.Tensor:
    """The reverse: float32 [..., head_dim]. Rows of other dtypes are returned as they are."""
    if rows.dtype != torch.int8:
        return rows
    return rows[..., :-SCALE_BYTES].float() * rows[..., -SCALE_BYTES:].view(torch.float32)
