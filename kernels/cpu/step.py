"""A decoder's forward pass in one call of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_void_p
from operator import is_

import torch

from kernels.cpu.library import (
    DTYPES,
    BatchArguments,
    DecoderArguments,
    LayerArguments,
    Library,
    LinearArguments,
    Times,
    sequences,
)
from kernels.cpu.linear import PackedLinear
from kernels.decoder import Batch, DecoderParts, LayerParts, Linear
from kernels.kv import layer_shape


def fuse(library: Library, parts: DecoderParts) -> Step | None:
    """The decoder as one call; None where a part has a form that the library does not have."""
    linears = [parts.head, *(linear for layer in parts.layers for linear in _linears(layer))]
    packed = all(isinstance(linear, PackedLinear) for linear in linears)
    if not packed or parts.embedding.dtype not in DTYPES or parts.head_dim % 16:
        return None
    return Step(library, parts)


class Step:
    """``kernels.decoder.FusedDecoder``. Keeps the parts: the library has only their addresses."""

    def __init__(self, library: Library, parts: DecoderParts) -> None:
        self._library = library
        self._parts = parts
        self._dtype = parts.embedding.dtype
        self._vocabulary = len(parts.embedding)
        self._kv: tuple[torch.Tensor, ...] = ()
        self._memory = (c_void_p * 0)()
        self._layers = (LayerArguments * len(parts.layers))(*map(_layer, parts.layers))
        self._decoder = DecoderArguments(
            layers=ctypes.addressof(self._layers),
            embedding=parts.embedding.data_ptr(),
            norm=parts.norm.data_ptr(),
            cos_sin=parts.cos_sin.data_ptr(),
            head=_arguments(parts.head),
            hidden=parts.embedding.shape[1],
            num_layers=len(parts.layers),
            dtype=DTYPES[self._dtype],
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            head_dim=parts.head_dim,
            eps=parts.eps,
            scale=parts.scale,
        )

    def takes(self, kv: torch.Tensor) -> bool:
        return kv.dtype in (self._dtype, torch.int8) and kv.is_contiguous() and kv.shape[3] & (kv.shape[3] - 1) == 0

    def __call__(
        self,
        batch: Batch,
        kv: Sequence[torch.Tensor],
        samples: torch.Tensor,
        likeliest: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        if len(kv) != len(self._kv) or not all(map(is_, kv, self._kv)):  # a worker's are always the same, and many
            self._use(kv)
        self._check(batch, samples, samples if likeliest is None else likeliest)
        logits = torch.empty((len(samples), self._vocabulary), dtype=self._dtype)
        arguments = BatchArguments(
            tokens=batch.tokens.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            count=len(batch.tokens),
            decodes=sequences(batch.decode_tables, batch.decode_lens),
            chunks=sequences(batch.chunk_tables, batch.chunk_lens),
            chunk_cu_seqlens=batch.chunk_cu_seqlens.data_ptr(),
            samples=samples.data_ptr(),
            sample_count=len(samples),
            likeliest=None if likeliest is None else likeliest.data_ptr(),
        )
        times = Times()
        self._library.step(
            byref(self._decoder),
            self._memory,
            kv[0].shape[3],
            kv[0].dtype == torch.int8,
            byref(arguments),
            logits.data_ptr(),
            byref(times),
        )
        return logits, {name: getattr(times, name) for name, _ in Times._fields_}

    def _use(self, kv: Sequence[torch.Tensor]) -> None:
        dtype = kv[0].dtype
        block = layer_shape(1, self._parts.kv_heads, kv[0].shape[3], self._parts.head_dim, dtype)[1:]
        fits = all(layer.shape[1:] == block and layer.dtype == dtype and self.takes(layer) for layer in kv)
        if len(kv) != len(self._layers) or not fits:
            raise ValueError(f"kv is not {len(self._layers)} contiguous {dtype} tensors of blocks {block}")
        self._kv = tuple(kv)
        self._memory = (c_void_p * len(kv))(*[layer.data_ptr() for layer in kv])

    def _check(self, batch: Batch, samples: torch.Tensor, likeliest: torch.Tensor) -> None:
        tokens, decodes, chunks = len(batch.tokens), len(batch.decode_lens), len(batch.chunk_lens)
        for name, tensor, dtype, shape in (
            ("tokens", batch.tokens, torch.int64, (tokens,)),
            ("positions", batch.positions, torch.int64, (tokens,)),
            ("slot_mapping", batch.slot_mapping, torch.int64, (tokens,)),
            ("decode_lens", batch.decode_lens, torch.int32, (decodes,)),
            ("decode_tables", batch.decode_tables, torch.int32, (decodes, batch.decode_tables.shape[-1])),
            ("chunk_lens", batch.chunk_lens, torch.int32, (chunks,)),
            ("chunk_tables", batch.chunk_tables, torch.int32, (chunks, batch.chunk_tables.shape[-1])),
            ("chunk_cu_seqlens", batch.chunk_cu_seqlens, torch.int32, (chunks + 1,)),
            ("samples", samples, torch.int64, (len(samples),)),
            ("likeliest", likeliest, torch.int64, (len(samples),)),
        ):
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
                found = f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}"
                raise ValueError(f"{name} is {found}; wanted is a contiguous {dtype} {shape}")


def _layer(parts: LayerParts) -> LayerArguments:
    qkv, out, gate_up, down = map(_arguments, _linears(parts))
    return LayerArguments(
        input_norm=parts.input_norm.data_ptr(),
        post_norm=parts.post_norm.data_ptr(),
        q_norm=None if parts.q_norm is None else parts.q_norm.data_ptr(),
        k_norm=None if parts.k_norm is None else parts.k_norm.data_ptr(),
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        window=parts.window,
    )


def _linears(parts: LayerParts) -> list[Linear]:
    return [parts.qkv, parts.out, parts.gate_up, parts.down]


def _arguments(linear: Linear) -> LinearArguments:
    assert isinstance(linear, PackedLinear)
    return linear.arguments
