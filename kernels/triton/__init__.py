"""The kernels in Triton, for NVIDIA and AMD devices; also in Triton's interpreter, which the tests run them in."""

from kernels.triton.attention import paged_decode, paged_prefill
from kernels.triton.fused import add_rms_norm, rms_norm, rope, silu_mul
from kernels.triton.memory import copy_blocks, rope_store, store_kv
from kernels.triton.sampling import sample
from kernels.triton.swap import swap_blocks

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
