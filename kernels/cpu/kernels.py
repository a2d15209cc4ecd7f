"""The operations of ``kernels.ops`` on a CPU, by the compiled library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from functools import partial
from itertools import accumulate, chain

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.cpu import build
from kernels.cpu.library import DTYPES, Cache, Edits, Ids, Library, Sampling, Scores, sequences
from kernels.cpu.linear import GROUP, PackedLinear
from kernels.cpu.pages import Pages
from kernels.cpu.step import Step, fuse
from kernels.decoder import DecoderParts
from kernels.edits import LogitEdits, RowIds
from kernels.errors import UnavailableError
from kernels.kv import head_dim
from kernels.quantized import QuantizedWeight


def load() -> CpuKernels:
    """The kernels for this processor, compiled first if need be. Raises UnavailableError where that cannot be, and
    ConfigError when KERNELS_CPU_ISA is nonsense."""
    path = build.library(build.choose())
    try:
        return CpuKernels(Library(path))
    except OSError as error:  # a library that it needs in turn is missing, or the folder forbids execution
        raise UnavailableError(f"cannot load compiled kernels: {error}") from error


def check_kv(block_size: int, head_dim: int) -> None:
    """Raises UnavailableError for KV memory that goes to the reference because of an option."""
    if block_size & (block_size - 1):
        raise UnavailableError(f"--block-size {block_size}: native attention takes powers of two only")


class CpuKernels:
    """Arguments and results are as in ``kernels.ops``, which checks them. Head sizes that are no multiple of 16,
    block sizes that are no power of two and dtypes other than float32, bfloat16 and float16 go to the reference."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._pages = Pages()

    def pin_threads(self, cpus: Sequence[Sequence[int]]) -> None:
        bounds = torch.tensor([0, *accumulate(map(len, cpus))], dtype=torch.int32)
        flat = torch.tensor(list(chain(*cpus)), dtype=torch.int32)
        refused = self._library.pin_threads(len(cpus), bounds.data_ptr(), flat.data_ptr())
        if refused:
            raise OSError(f"the system keeps {refused} of {len(cpus)} threads from their CPUs")

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if not _stores(kv, k.dtype):
            return reference.store_kv(k, v, kv, slot_mapping)
        k, v = _rows(k), _rows(v)
        self._library.store_kv(
            byref(_cache(kv, k.dtype)),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            slot_mapping.data_ptr(),
            len(k),
        )
        return None

    def copy_blocks(self, kvs: Sequence[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for kv in kvs:
            self._copy(kv, kv, sources, destinations)

    def swap_blocks(
        self,
        source_kvs: Sequence[torch.Tensor],
        target_kvs: Sequence[torch.Tensor],
        sources: torch.Tensor,
        destinations: torch.Tensor,
    ) -> None:
        for source, target in zip(source_kvs, target_kvs, strict=True):
            self._copy(source, target, sources, destinations)

    def paged_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        if not _attends(kv, q.dtype):
            return reference.paged_decode(q, kv, block_table, seq_lens, scale, window, softcap)
        q = _rows(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        self._library.paged_decode(
            byref(_cache(kv, q.dtype)),
            byref(sequences(block_table, seq_lens)),
            byref(Scores(scale, softcap, window)),
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            q.shape[1],
        )
        return out

    def paged_prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        if not _attends(kv, q.dtype):
            return reference.paged_prefill(q, kv, block_table, cu_seqlens, seq_lens, scale, window, softcap)
        q = _rows(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        self._library.paged_prefill(
            byref(_cache(kv, q.dtype)),
            byref(sequences(block_table, seq_lens)),
            byref(Scores(scale, softcap, window)),
            cu_seqlens.data_ptr(),
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            q.shape[1],
        )
        return out

    def rope(self, x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
        if x.dtype not in DTYPES or not _dense_rows(x):
            return reference.rope(x, cos_sin, positions)
        self._library.rope(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            cos_sin.data_ptr(),
            positions.data_ptr(),
            len(x),
            x.shape[1],
            x.shape[2],
        )
        return None

    def rope_store(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        kv_heads = kv.shape[2]
        heads = qkv.shape[1] - 2 * kv_heads
        if not _stores(kv, qkv.dtype) or not _dense_rows(qkv):
            return reference.rope_store(qkv, kv, cos_sin, positions, slot_mapping)
        self._library.rope_store(
            byref(_cache(kv, qkv.dtype)),
            qkv.data_ptr(),
            qkv.stride(0),
            cos_sin.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            len(qkv),
            heads,
            None,
            None,
            0.0,
        )
        return None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype not in DTYPES:
            return reference.rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        self._library.rms_norm(
            DTYPES[x.dtype],
            rows.data_ptr(),
            rows.stride(0),
            None,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            len(rows),
            rows.shape[1],
        )
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype not in DTYPES or not residual.is_contiguous():
            return reference.add_rms_norm(x, residual, weight, eps)
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._library.rms_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.shape[-1],
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            x.numel() // x.shape[-1],
            x.shape[-1],
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype not in DTYPES or gate_up.dim() != 2:
            return reference.silu_mul(gate_up)
        gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
        out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype)
        self._library.silu_mul(
            DTYPES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), len(out), out.shape[1]
        )
        return out

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        edits: LogitEdits | None = None,
    ) -> torch.Tensor:
        if logits.dtype not in DTYPES:
            logits = logits.float()
        if edits is None and not bool(temperature.any()):
            return self.argmax(logits)
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        columns = [x.contiguous() for x in (temperature, top_k, top_p, min_p, seeds, positions)]
        out = torch.empty(len(logits), dtype=torch.int64)
        self._library.sample(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            byref(Sampling(*(x.data_ptr() for x in columns))),
            None if edits is None else byref(_c_edits(edits)),
            out.data_ptr(),
            *logits.shape,
        )
        return out

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Index of each row's largest of ``logits [S, V]``, the first of several: [S] int64."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        out = torch.empty(len(logits), dtype=torch.int64)
        self._library.argmax(
            DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), out.data_ptr(), len(logits), logits.shape[1]
        )
        return out

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        if weight.dtype not in DTYPES or weight.shape[1] % 2:
            return partial(F.linear, weight=weight, bias=bias)
        return PackedLinear(self._library, self._pages, weight, bias, weight.dtype)

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """``linear`` that multiplies codes, with inputs rounded to integers of ``weight.digits`` bytes."""
        if dtype not in DTYPES or weight.group % GROUP:
            return self.linear(weight.dequantize(dtype), bias)
        return PackedLinear(self._library, self._pages, weight, bias, dtype)

    def decoder(self, parts: DecoderParts) -> Step | None:
        """The decoder as one call; None where a part has a form that the library does not have."""
        return fuse(self._library, parts)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor
    ) -> None:
        block_bytes = source.stride(0) * source.element_size()
        self._library.copy_blocks(
            source.data_ptr(),
            target.data_ptr(),
            block_bytes,
            sources.data_ptr(),
            destinations.data_ptr(),
            len(sources),
        )


def _c_edits(edits: LogitEdits) -> Edits:
    def ids(rows: RowIds) -> Ids:
        values = None if rows.values is None else rows.values.data_ptr()
        return Ids(rows.bounds.data_ptr(), rows.ids.data_ptr(), values)

    lists = (edits.allowed, edits.banned, edits.bias, edits.seen)
    return Edits(*map(ids, lists), edits.penalties.data_ptr())


def _attends(kv: torch.Tensor, dtype: torch.dtype) -> bool:
    return _stores(kv, dtype) and head_dim(kv) % 16 == 0


def _stores(kv: torch.Tensor, dtype: torch.dtype) -> bool:
    return dtype in DTYPES and kv.shape[3] & (kv.shape[3] - 1) == 0


def _cache(kv: torch.Tensor, dtype: torch.dtype) -> Cache:
    return Cache(kv.data_ptr(), DTYPES[dtype], kv.shape[2], kv.shape[3], head_dim(kv), kv.dtype == torch.int8)


def _dense_rows(x: torch.Tensor) -> bool:
    """Whether each of x [T, heads, D]'s rows is one piece."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if _dense_rows(x) else x.contiguous()
