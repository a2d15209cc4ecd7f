"""What the system tells of memory that is mapped."""

from __future__ import annotations

import ctypes
import mmap

import torch


def resident(tensor: torch.Tensor) -> int:
    """Bytes of ``tensor``, whose pages are whole, that have memory behind them."""
    present = (ctypes.c_ubyte * (tensor.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), present) == 0
    return sum(flags & 1 for flags in present) * mmap.PAGESIZE
