"""The kernels in plain torch: what the other implementations are measured against, and what runs without them."""

from kernels.reference.attention import paged_decode, paged_prefill
from kernels.reference.fused import add_rms_norm, rms_norm, rope, silu_mul
from kernels.reference.memory import copy_blocks, rope_store, store_kv, swap_blocks
from kernels.reference.sampling import sample

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "paged_decode",
    "paged_prefill",
    "rms_norm",
    "rope",
    "rope_store",
    "sample",
    "silu_mul",
    "store_kv",
    "swap_blocks",
]
