"""``--quantization``: which weights are rounded, and to what."""

from __future__ import annotations

import torch

from kernels.quantized import QuantizedWeight, to_int4, to_int8


def quantize(weight: torch.Tensor, method: str, *, head: bool = False) -> torch.Tensor | QuantizedWeight:
    """``weight [outputs, inputs]`` as ``method`` has it, unchanged where its inputs are no whole number of groups.

    head: of the layer that gives logits, which takes 8 bits under int4 too: an error there is an error of the answer.
    gguf rounds nothing; it keeps what a file has.
    """
    inputs = weight.shape[1]
    if method == "int4" and not head and inputs % 32 == 0:
        return to_int4(weight)
    if method in ("int8", "int4") and inputs % 64 == 0:
        return to_int8(weight)
    return weight
