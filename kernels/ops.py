"""The operations a model is made of: each checks shapes and dtypes, then calls the chosen implementation.

``select`` chooses one at start-up. Shapes use T tokens, S sequences, H attention heads, K key/value heads, D elements
of a head. KV memory of one layer is ``kv [num_blocks, 2, K, block_size, D]``: a block is one contiguous piece, keys
before values. The reference and the CPU kernels also take it in int8, with a scale behind each row (``kernels.kv``);
what is stored is then rounded. Block 0 is zeroed padding and must stay so; every other slot outside a sequence's length
may hold anything, NaN included.

A wrong argument is a ValueError that names it. Scores, softmax, norms and sums are computed in float32.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.decoder import DecoderParts, FusedDecoder, Linear
from kernels.edits import LogitEdits, RowIds
from kernels.errors import UnavailableError
from kernels.kv import head_dim
from kernels.quantized import QuantizedWeight

log = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "cpu", "triton")


def torch_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return lambda x: F.linear(x, weight, bias)


class Backend(Protocol):
    """What an implementation provides: the operations of ``Kernels`` on arguments that are right."""

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor, /) -> None: ...

    def rope_store(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        /,
    ) -> None: ...

    def copy_blocks(
        self, kvs: Sequence[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor, /
    ) -> None: ...

    def swap_blocks(
        self,
        source_kvs: Sequence[torch.Tensor],
        target_kvs: Sequence[torch.Tensor],
        sources: torch.Tensor,
        destinations: torch.Tensor,
        /,
    ) -> None: ...

    def paged_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        /,
    ) -> torch.Tensor: ...

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
        /,
    ) -> torch.Tensor: ...

    def rope(self, x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, /) -> None: ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /
    ) -> torch.Tensor: ...

    def silu_mul(self, gate_up: torch.Tensor, /) -> torch.Tensor: ...

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        /,
    ) -> torch.Tensor: ...


def select(device: torch.device, backend: str = "auto") -> Kernels:
    """The operations on ``device`` by one of BACKENDS.

    auto: triton on CUDA; on a CPU the native kernels, or the reference (with a warning) where they cannot be had.
    Raises UnavailableError when a backend named outright cannot run, and ConfigError when KERNELS_CPU_ISA is nonsense.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of {', '.join(BACKENDS)}")
    if backend == "reference":
        return Kernels("reference", reference)
    if backend == "triton" or (backend == "auto" and device.type == "cuda"):
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UnavailableError(f"the Triton kernels do not run on {device} (but interpreted: TRITON_INTERPRET=1)")
        from kernels import triton

        return Kernels("triton", triton, check_kv=triton.check_kv)
    if device.type != "cpu":
        raise UnavailableError(f"the CPU kernels do not run on {device}")
    from kernels.cpu import check_kv, load

    try:
        native = load()
        return Kernels(
            "cpu",
            native,
            native.linear,
            native.decoder,
            check_kv=check_kv if backend == "cpu" else partial(_warn, check_kv),
            edited_sample=native.sample,
            quantized_linear=native.quantized_linear,
            pin_threads=native.pin_threads,
        )
    except UnavailableError as error:
        if backend == "cpu":
            raise
        log.warning("no native CPU kernels, the slower torch ones run instead: %s", error)
        return Kernels("reference", reference)


def _warn(check_kv: Callable[[int, int], None], block_size: int, head_dim: int) -> None:
    try:
        check_kv(block_size, head_dim)
    except UnavailableError as error:
        log.warning("the slower torch attention runs: %s", error)


class Kernels:
    """The operations by one implementation, whose name is ``name``."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        linear: Callable[[torch.Tensor, torch.Tensor | None], Linear] = torch_linear,
        decoder: Callable[[DecoderParts], FusedDecoder | None] = lambda _: None,
        check_kv: Callable[[int, int], None] = lambda block_size, head_dim: None,
        edited_sample: Callable[..., torch.Tensor] | None = None,
        quantized_linear: Callable[[QuantizedWeight, torch.Tensor | None, torch.dtype], Linear] | None = None,
        pin_threads: Callable[[Sequence[Sequence[int]]], None] = lambda cpus: None,
    ) -> None:
        """quantized_linear: None where weights are dequantised instead."""
        self.name = name
        self.check_kv = check_kv
        """Raises UnavailableError when the attention kernels do not take KV of this block size and head size."""
        self.decoder = decoder
        """The whole forward pass of a decoder in one call, None where there is no such thing."""
        self.pin_threads = pin_threads
        """Keeps the caller's i-th thread for computing, the caller itself being the first, to the CPUs ``cpus[i]``.
        Raises OSError where the system does not allow it."""
        self._edited_sample = edited_sample
        self._backend = backend
        self._linear = linear
        self._quantized_linear = quantized_linear

    @property
    def edits_logits(self) -> bool:
        """Whether ``sample`` takes edits."""
        return self._edited_sample is not None

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Writes token t's key and value ``k, v [T, K, D]`` to slot ``slot_mapping[t]`` (int64) of ``kv``.

        Slot s is offset ``s % block_size`` of block ``s // block_size``; -1 stores nothing. Slots must differ.
        """
        _kv(kv)
        _shape("k", k, (len(slot_mapping), kv.shape[2], head_dim(kv)))
        _shape("v", v, k.shape)
        _indices("slot_mapping", slot_mapping, torch.int64)
        _stored("k", k, kv)
        _dtype("v", v, k.dtype)
        self._backend.store_kv(k, v, kv, slot_mapping)

    def rope_store(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """``rope`` of queries and keys, and ``store_kv``, of the fused rows ``qkv [T, H + 2 K, D]``.

        Queries are rotated in place; keys on their way to ``kv``. What is left of them in ``qkv`` is undefined.
        """
        _kv(kv)
        if qkv.dim() != 3 or qkv.shape[1] <= 2 * kv.shape[2]:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}: too few heads for {kv.shape[2]} of kv")
        _shape("qkv", qkv, (len(slot_mapping), qkv.shape[1], head_dim(kv)))
        _stored("qkv", qkv, kv)
        _indices("slot_mapping", slot_mapping, torch.int64)
        _rotary(cos_sin, positions, qkv)
        self._backend.rope_store(qkv, kv, cos_sin, positions, slot_mapping)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A function of ``x [T, inputs]`` that returns ``x @ weight.T + bias``, [T, outputs].

        It may keep the weight in an order of its own instead of ``weight [outputs, inputs]``.
        """
        if weight.dim() != 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}, not (outputs, inputs)")
        if bias is not None:
            _shape("bias", bias, weight.shape[:1])
            _dtype("bias", bias, weight.dtype)
        return self._linear(weight, bias)

    def quantized_linear(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """``linear`` of a quantised weight, of inputs, bias and results of ``dtype``."""
        if bias is not None:
            _shape("bias", bias, weight.shape[:1])
            _dtype("bias", bias, dtype)
        if self._quantized_linear is None:
            return self._linear(weight.dequantize(dtype), bias)
        return self._quantized_linear(weight, bias, dtype)

    def copy_blocks(self, kvs: Sequence[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies block ``sources[i]`` over block ``destinations[i]`` (both [P] int64) in every layer of ``kvs``.

        Destinations must differ from each other and from all sources.
        """
        _pairs(sources, destinations)
        self._backend.copy_blocks(kvs, sources, destinations)

    def swap_blocks(
        self,
        source_kvs: Sequence[torch.Tensor],
        target_kvs: Sequence[torch.Tensor],
        sources: torch.Tensor,
        destinations: torch.Tensor,
    ) -> None:
        """Copies block ``sources[i]`` of every layer of one memory over block ``destinations[i]`` of another.

        sources and destinations: [P] int64 on the host; destinations must differ. The memories may have different
        numbers of blocks and lie on different devices; host memory is pinned then, or copies wait for each other.
        """
        _pairs(sources, destinations)
        if len(source_kvs) != len(target_kvs):
            raise ValueError(f"target_kvs has {len(target_kvs)} layers, not {len(source_kvs)}")
        for source, target in zip(source_kvs, target_kvs, strict=True):
            _kv(source)
            _shape("target", target, (len(target), *source.shape[1:]))
            _dtype("target", target, source.dtype)
        self._backend.swap_blocks(source_kvs, target_kvs, sources, destinations)

    def paged_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Attention of one new token a sequence, whose own key and value are stored already.

        q: [S, H, D]. block_table: [S, max_blocks] int32. seq_lens: [S] int32, the new token included; 0 gives zeros.
        window: only the last ``window`` tokens count (0: all). softcap: scores become softcap * tanh(score / softcap)
        (0: unchanged). Returns [S, H, D] in q's dtype.
        """
        _attention(q, kv, block_table, seq_lens)
        _shape("q", q, (len(seq_lens), q.shape[1], head_dim(kv)))
        return self._backend.paged_decode(q, kv, block_table, seq_lens, scale, window, softcap)

    def paged_prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Causal attention of several new tokens a sequence (a prompt or a chunk of it), stored already.

        q: [T, H, D]; sequence i's new tokens are rows cu_seqlens[i] .. cu_seqlens[i + 1] (int32 [S + 1]) and the last
        of its ``seq_lens[i]`` tokens. The rest is as in ``paged_decode``. Returns [T, H, D].
        """
        _attention(q, kv, block_table, seq_lens)
        _shape("q", q, (len(q), q.shape[1], head_dim(kv)))
        _shape("cu_seqlens", cu_seqlens, (len(seq_lens) + 1,))
        _indices("cu_seqlens", cu_seqlens, torch.int32)
        return self._backend.paged_prefill(q, kv, block_table, cu_seqlens, seq_lens, scale, window, softcap)

    def rope(self, x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotates ``x [T, heads, D]`` in place by each token's position (``positions [T]`` int64).

        cos_sin: [max_position, D] float32, D/2 cosines then D/2 sines. Element i is paired with element i + D/2, as in
        the Hugging Face layout of weights.
        """
        _rotary(cos_sin, positions, x)
        self._backend.rope(x, cos_sin, positions)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; weight [x.shape[-1]]."""
        _shape("weight", weight, (x.shape[-1],))
        _dtype("weight", weight, x.dtype)
        return self._backend.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds x to ``residual`` in place and returns the norm of that."""
        _shape("weight", weight, (x.shape[-1],))
        _dtype("weight", weight, x.dtype)
        _shape("residual", residual, x.shape)
        return self._backend.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``gate_up [T, 2 * I]``, gate in the first half. Returns [T, I]."""
        if gate_up.shape[-1] % 2:
            raise ValueError(f"gate_up has {gate_up.shape[-1]} columns, not an even number")
        return self._backend.silu_mul(gate_up)

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
        """One token id per row of ``logits [S, V]``: [S] int64, a function of the row, its seed and its position alone.

        temperature (0 is greedy), top_p and min_p: [S] float32; top_k (0 is off), seeds and positions: [S] int64. After
        dividing by temperature, min_p drops tokens less likely than min_p times the likeliest, then top_k keeps the
        likeliest k, then top_p the fewest of those that hold at least top_p of their probability. edits: what is done
        to the logits first, where ``edits_logits``; the tensor itself stays as it is.
        """
        for name, values, dtype in (
            ("temperature", temperature, torch.float32),
            ("top_k", top_k, torch.int64),
            ("top_p", top_p, torch.float32),
            ("min_p", min_p, torch.float32),
            ("seeds", seeds, torch.int64),
            ("positions", positions, torch.int64),
        ):
            _shape(name, values, (len(logits),))
            _dtype(name, values, dtype)
        if edits is None:
            return self._backend.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
        if self._edited_sample is None:
            raise ValueError(f"the {self.name} kernels do not edit logits")
        _edits(edits, len(logits))
        return self._edited_sample(logits, temperature, top_k, top_p, min_p, seeds, positions, edits)


def _attention(q: torch.Tensor, kv: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
    _kv(kv)
    _stored("q", q, kv)
    _dtype("block_table", block_table, torch.int32)
    if block_table.shape[-1] > 1 and block_table.stride(-1) != 1:
        raise ValueError(f"block_table has stride {block_table.stride(-1)} within a row, not 1")
    _indices("seq_lens", seq_lens, torch.int32)
    if block_table.dim() != 2 or len(block_table) != len(seq_lens):
        raise ValueError(f"block_table has shape {tuple(block_table.shape)}, not ({len(seq_lens)}, max_blocks)")
    if q.dim() != 3 or q.shape[1] % kv.shape[2]:
        raise ValueError(f"q has shape {tuple(q.shape)}: heads must be a multiple of the {kv.shape[2]} of kv")
    if q.stride(2) != 1:
        raise ValueError(f"q has stride {q.stride(2)} within a head, not 1")


def _edits(edits: LogitEdits, rows: int) -> None:
    for name in ("allowed", "banned", "bias", "seen"):
        lists: RowIds = getattr(edits, name)
        _indices(f"{name}.bounds", lists.bounds, torch.int64)
        _shape(f"{name}.bounds", lists.bounds, (rows + 1,))
        _indices(f"{name}.ids", lists.ids, torch.int64)
        if name in ("bias", "seen"):
            if lists.values is None:
                raise ValueError(f"{name} has no values")
            _indices(f"{name}.values", lists.values, torch.float32)
            _shape(f"{name}.values", lists.values, lists.ids.shape)
    _indices("penalties", edits.penalties, torch.float32)
    _shape("penalties", edits.penalties, (rows, 3))


def _rotary(cos_sin: torch.Tensor, positions: torch.Tensor, x: torch.Tensor) -> None:
    _dtype("cos_sin", cos_sin, torch.float32)
    _shape("cos_sin", cos_sin, (len(cos_sin), x.shape[2]))
    _indices("positions", positions, torch.int64)
    _shape("positions", positions, (len(x),))


def _kv(kv: torch.Tensor) -> None:
    if kv.dim() != 5 or kv.shape[1] != 2 or not kv.is_contiguous():
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}, not a contiguous (blocks, 2, kv_heads, block_size, head_dim)"
        )


def _pairs(sources: torch.Tensor, destinations: torch.Tensor) -> None:
    _indices("sources", sources, torch.int64)
    _indices("destinations", destinations, torch.int64)
    _shape("destinations", destinations, sources.shape)


def _stored(name: str, tensor: torch.Tensor, kv: torch.Tensor) -> None:
    """What is in ``kv`` has the tensor's dtype, or is rounded."""
    if kv.dtype != torch.int8:
        _dtype(name, tensor, kv.dtype)
    elif not tensor.dtype.is_floating_point:
        raise ValueError(f"{name} is {tensor.dtype}, not of floating-point numbers")


def _shape(name: str, tensor: torch.Tensor, wanted: tuple[int, ...] | torch.Size) -> None:
    if tensor.shape != tuple(wanted):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(wanted)}")


def _indices(name: str, tensor: torch.Tensor, wanted: torch.dtype) -> None:
    _dtype(name, tensor, wanted)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has stride {tensor.stride()[-1]}, not 1")


def _dtype(name: str, tensor: torch.Tensor, wanted: torch.dtype) -> None:
    if tensor.dtype != wanted:
        raise ValueError(f"{name} is {tensor.dtype}, not {wanted}")
