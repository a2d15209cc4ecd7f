"""Blocks of GGUF files as codes, scales and minimums, for kernels that multiply codes.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. What a file says is kept: 16-bit scales and
minimums are taken as they are. Only those of K-quants are products (of 16 bits and 6), which are rounded to 16 bits
again, to a tenth of what rounding the weight itself to bfloat16 would cost.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kernels.quantized import ZERO, QuantizedWeight
from shared.models.gguf_file import GGUFFile

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]

DIGITS = 2
"""Inputs are rounded to 15 bits and a sign: the weights are then all that is quantised."""


def kept(file: GGUFFile, name: str) -> QuantizedWeight | None:
    """The matrix ``name`` without dequantising it, in the file's order of rows; None for a kind whose groups of inputs
    are none of the kernels' (those of 16), and what is not quantised."""
    info = file.tensors[name]
    if len(info.shape) != 2 or info.kind.name not in _READERS:
        return None
    width, bits, read = _READERS[info.kind.name]
    blocks = file.blocks(name).reshape(-1, width)
    codes, scales, minimums = read(blocks)
    rows, groups = info.shape[0], info.shape[1] // 32
    return QuantizedWeight(
        codes=torch.from_numpy(codes.reshape(info.shape)),
        scales=torch.from_numpy(scales.reshape(rows, groups)),
        minimums=None if minimums is None else torch.from_numpy(minimums.reshape(rows, groups)),
        bits=bits,
        digits=DIGITS,
    )


def _halves(blocks: Bytes, at: int) -> Halves:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)[:, 0]


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, 2 n] of [blocks, n]: first all lower halves of the bytes, then all upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[blocks, 32] of 32 bits in 4 bytes, as 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> tuple[Bytes, Halves, Halves | None]:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, -8 * scales


def _q4_1(blocks: Bytes) -> tuple[Bytes, Halves, Halves | None]:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> tuple[Bytes, Halves, Halves | None]:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scales, -16 * scales


def _q5_1(blocks: Bytes) -> tuple[Bytes, Halves, Halves | None]:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> tuple[Bytes, Halves, Halves | None]:
    return blocks[:, 2:] ^ np.uint8(ZERO), _halves(blocks, 0), None


def _q4_k(blocks: Bytes) -> tuple[Bytes, Halves, Halves | None]:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32))
    return codes, *_super_scales(blocks)


def _q5_k(blocks: Bytes) -> tuple[Bytes, Halves, Halves | None]:
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")  # bit i is of the block's i-th 32 values
    return low | high.transpose(0, 2, 1) << np.uint8(4), *_super_scales(blocks)


def _super_scales(blocks: Bytes) -> tuple[Halves, Halves]:
    """Scales and minimums of the 8 groups of each block: 6 bits each, in 12 bytes, times the block's own of 16 bits."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, mixed & 15 | first >> 6 << 4], axis=1)
    minimums = np.concatenate([second & 63, mixed >> 4 | second >> 6 << 4], axis=1)
    scale, minimum = (_halves(blocks, at).astype(np.float32)[:, None] for at in (0, 2))
    return (scale * scales).astype(np.float16), (-minimum * minimums).astype(np.float16)


# Bytes of a block, bits of the kept codes.
_READERS: dict[str, tuple[int, int, Callable[[Bytes], tuple[Bytes, Halves, Halves | None]]]] = {
    "Q4_0": (18, 4, _q4_0),
    "Q4_1": (20, 4, _q4_1),
    "Q5_0": (22, 8, _q5_0),
    "Q5_1": (24, 8, _q5_1),
    "Q8_0": (34, 8, _q8_0),
    "Q4_K": (144, 4, _q4_k),
    "Q5_K": (176, 8, _q5_k),
}
