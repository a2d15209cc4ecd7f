"""Linear layers over packed weights."""

from __future__ import annotations

from ctypes import byref

import torch

from kernels.cpu.library import DTYPES, Library, LinearArguments, Quantization
from kernels.cpu.pages import Pages
from kernels.quantized import QuantizedWeight

GROUP = 32
"""Inputs with one scale are a multiple of this many."""


class PackedLinear:
    """``x @ weight.T + bias`` over a copy of the weight in the kernel's own order; inputs are even."""

    def __init__(
        self,
        library: Library,
        pages: Pages,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """pages: where the copy lies. dtype: of x, bias and results, and of a weight that is not quantised."""
        self._library = library
        self._dtype = dtype
        self._bias = bias
        quantization = Quantization()
        outputs, inputs = weight.shape
        if isinstance(weight, QuantizedWeight):
            quantization = Quantization(weight.bits, weight.group, weight.digits, weight.minimums is not None)
            self._packed = pages.take(library.quantized_bytes(byref(quantization), outputs, inputs))
            codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
            minimums = None if weight.minimums is None else weight.minimums.contiguous()
            library.quantized_pack(
                byref(quantization),
                codes.data_ptr(),
                scales.data_ptr(),
                None if minimums is None else minimums.data_ptr(),
                self._packed.data_ptr(),
                outputs,
                inputs,
            )
        else:
            weight = weight.contiguous()
            self._packed = pages.take(library.linear_bytes(DTYPES[dtype], outputs, inputs))
            library.linear_pack(DTYPES[dtype], weight.data_ptr(), self._packed.data_ptr(), outputs, inputs)
        self.arguments = LinearArguments(
            packed=self._packed.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            outputs=outputs,
            inputs=inputs,
            quantization=quantization,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, inputs] in ``dtype``. Returns [rows, outputs]."""
        x = x if x.stride(1) == 1 and x.stride(0) % 2 == 0 else x.contiguous()
        outputs = self.arguments.outputs
        out = torch.empty((len(x), outputs), dtype=x.dtype)
        self._library.linear(
            DTYPES[self._dtype], byref(self.arguments), x.data_ptr(), x.stride(0), out.data_ptr(), outputs, len(x)
        )
        return out
