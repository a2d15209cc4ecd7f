"""Device functions that every kernel here shares, and what the interpreter needs to compute as a GPU would.

Triton's interpreter (``TRITON_INTERPRET=1``) has no bfloat16 arithmetic: products of bfloat16 operands multiply their
bit patterns, and casts to it truncate. So kernels here compute in float32 and go through ``dot`` and ``cast``, which
repair both in the interpreter and cost nothing when compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

knobs.language.default_fp_fusion = True  # as it is in 3.6; left unset, 3.9 warns that 3.10 changes it

INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))
"""Whether ``@triton.jit`` functions of this process run in the interpreter; read once, as ``@triton.jit`` does."""


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with float32 accumulation; float32 operands are multiplied as such, never rounded to TF32."""
    if INTERPRET:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 ``x`` rounded to the nearest value of ``dtype``, ties to even."""
    if INTERPRET:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = bits + 0x7FFF + ((bits >> 16) & 1)
            x = (bits & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)
