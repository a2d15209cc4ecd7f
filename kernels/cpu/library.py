"""The compiled library as Python sees it: C structures and typed functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Cache(Structure):
    """KV memory of one layer."""

    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int32),
        ("kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_dim", c_int32),
        ("int8", c_int32),
    )


class Sequences(Structure):
    """Block tables and lengths of a batch."""

    _fields_ = (("block_table", c_void_p), ("table_stride", c_int64), ("seq_lens", c_void_p), ("count", c_int32))


class Scores(Structure):
    _fields_ = (("scale", c_float), ("softcap", c_float), ("window", c_int32))


class Sampling(Structure):
    _fields_ = (
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
    )


class Ids(Structure):
    """Lists of token ids, one a row."""

    _fields_ = (("bounds", c_void_p), ("ids", c_void_p), ("values", c_void_p))


class Edits(Structure):
    _fields_ = (("allowed", Ids), ("banned", Ids), ("bias", Ids), ("seen", Ids), ("penalties", c_void_p))


class Quantization(Structure):
    """How a weight is quantised; all zero for one that is not."""

    _fields_ = (("bits", c_int32), ("group", c_int32), ("digits", c_int32), ("minimums", c_int32))


class LinearArguments(Structure):
    """A packed weight and its bias."""

    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("quantization", Quantization),
    )


class LayerArguments(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", LinearArguments),
        ("out", LinearArguments),
        ("gate_up", LinearArguments),
        ("down", LinearArguments),
        ("window", c_int32),
    )


class DecoderArguments(Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("cos_sin", c_void_p),
        ("head", LinearArguments),
        ("hidden", c_int64),
        ("num_layers", c_int32),
        ("dtype", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("eps", c_float),
        ("scale", c_float),
    )


class BatchArguments(Structure):
    """The tokens of one step."""

    _fields_ = (
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("count", c_int64),
        ("decodes", Sequences),
        ("chunks", Sequences),
        ("chunk_cu_seqlens", c_void_p),
        ("samples", c_void_p),
        ("sample_count", c_int64),
        ("likeliest", c_void_p),
    )


class Times(Structure):
    """Seconds of a step by part."""

    _fields_ = (("linear", c_double), ("attention", c_double), ("other", c_double), ("head", c_double))


def sequences(block_table: torch.Tensor, seq_lens: torch.Tensor) -> Sequences:
    return Sequences(block_table.data_ptr(), block_table.stride(0), seq_lens.data_ptr(), len(seq_lens))


_PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {
    "quire_pin_threads": (c_int32, [c_int32, c_void_p, c_void_p]),
    "quire_store_kv": (None, [POINTER(Cache), c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64]),
    "quire_copy_blocks": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
    "quire_paged_decode": (
        None,
        [POINTER(Cache), POINTER(Sequences), POINTER(Scores), c_void_p, c_int64, c_void_p, c_int32],
    ),
    "quire_paged_prefill": (
        None,
        [POINTER(Cache), POINTER(Sequences), POINTER(Scores), c_void_p, c_void_p, c_int64, c_void_p, c_int32],
    ),
    "quire_rope": (None, [c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32, c_int32]),
    "quire_rope_store": (
        None,
        [
            POINTER(Cache),
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int64,
            c_int32,
            c_void_p,
            c_void_p,
            c_float,
        ],
    ),
    "quire_rms_norm": (None, [c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int32]),
    "quire_silu_mul": (None, [c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int32]),
    "quire_linear_bytes": (c_int64, [c_int32, c_int64, c_int64]),
    "quire_linear_pack": (None, [c_int32, c_void_p, c_void_p, c_int64, c_int64]),
    "quire_quantized_bytes": (c_int64, [POINTER(Quantization), c_int64, c_int64]),
    "quire_quantized_pack": (
        None,
        [POINTER(Quantization), c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64],
    ),
    "quire_linear": (
        None,
        [c_int32, POINTER(LinearArguments), c_void_p, c_int64, c_void_p, c_int64, c_int64],
    ),
    "quire_step": (
        None,
        [
            POINTER(DecoderArguments),
            POINTER(c_void_p),
            c_int32,
            c_int32,
            POINTER(BatchArguments),
            c_void_p,
            POINTER(Times),
        ],
    ),
    "quire_sample": (
        None,
        [c_int32, c_void_p, c_int64, POINTER(Sampling), POINTER(Edits), c_void_p, c_int64, c_int64],
    ),
    "quire_argmax": (None, [c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64]),
}


class Library:
    """Functions of one compiled library, named as in src/kernels.h without their prefix.

    torch is imported above, before the library is loaded: both then use torch's OpenMP threads.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("quire_"), function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(f"the library has no function {name}")
