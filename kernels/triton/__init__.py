"""The kernels in Triton, for NVIDIA and AMD devices; also in Triton's interpreter, which the tests run them in."""

from kernels.errors import UnavailableError
from kernels.reference import swap_blocks
from kernels.triton.attention import paged_decode, paged_prefill
from kernels.triton.fused import add_rms_norm, rms_norm, rope, silu_mul
from kernels.triton.memory import copy_blocks, rope_store, store_kv
from kernels.triton.sampling import sample

__all__ = [
    "add_rms_norm",
    "check_kv",
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


def check_kv(block_size: int, head_dim: int) -> None:
    """Raises UnavailableError for KV memory of a shape that these kernels are not made for."""
    if block_size not in (16, 32, 64, 128):
        raise UnavailableError(f"block size {block_size}: these kernels take 16, 32, 64 or 128")
    if head_dim > 256:
        raise UnavailableError(f"heads of {head_dim} elements: these kernels take up to 256")
