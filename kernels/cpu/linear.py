"""Linear layers over packed weights."""

from __future__ import annotations

from ctypes import byref

import torch

from kernels.cpu.library import DTYPES, Library, LinearArguments


class PackedLinear:
    """``x @ weight.T + bias`` over a copy of the weight in the kernel's own order; inputs are even."""

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        outputs, inputs = weight.shape
        self._library = library
        self._dtype = DTYPES[weight.dtype]
        self._bias = bias
        self._packed = torch.empty(library.linear_bytes(self._dtype, outputs, inputs), dtype=torch.uint8)
        library.linear_pack(self._dtype, weight.contiguous().data_ptr(), self._packed.data_ptr(), outputs, inputs)
        self.arguments = LinearArguments(
            self._packed.data_ptr(), None if bias is None else bias.data_ptr(), outputs, inputs
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, inputs] in the weight's dtype. Returns [rows, outputs]."""
        x = x if x.stride(1) == 1 and x.stride(0) % 2 == 0 else x.contiguous()
        outputs = self.arguments.outputs
        out = torch.empty((len(x), outputs), dtype=x.dtype)
        self._library.linear(
            self._dtype, byref(self.arguments), x.data_ptr(), x.stride(0), out.data_ptr(), outputs, len(x)
        )
        return out
