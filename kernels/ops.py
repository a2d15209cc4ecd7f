"""The operations a model is made of: every function checks shapes and dtypes, then calls the tensor's device's kernel.

Shapes use T tokens, S sequences, H attention heads, K key/value heads, D elements of a head. KV memory of one layer
is ``kv [num_blocks, 2, K, block_size, D]``: a block is one contiguous piece, keys before values. Block 0 is zeroed
padding and must stay so; every other slot outside a sequence's length may hold anything, NaN included.

A wrong argument is a ValueError that names it. Scores, softmax, norms and sums are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import reference


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes token t's key and value ``k, v [T, K, D]`` to slot ``slot_mapping[t]`` (int64) of ``kv``.

    Slot s is offset ``s % block_size`` of block ``s // block_size``; -1 stores nothing. Slots must differ.
    """
    _kv(kv)
    _shape("k", k, (len(slot_mapping), kv.shape[2], kv.shape[4]))
    _shape("v", v, k.shape)
    _dtype("slot_mapping", slot_mapping, torch.int64)
    _dtype("k", k, kv.dtype)
    _dtype("v", v, kv.dtype)
    reference.store_kv(k, v, kv, slot_mapping)


def copy_blocks(kvs: Sequence[torch.Tensor], sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copies block ``sources[i]`` over block ``destinations[i]`` (both [P] int64) in every layer of ``kvs``.

    Destinations must differ from each other and from all sources.
    """
    _dtype("sources", sources, torch.int64)
    _dtype("destinations", destinations, torch.int64)
    _shape("destinations", destinations, sources.shape)
    reference.copy_blocks(kvs, sources, destinations)


def paged_decode(
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
    _shape("q", q, (len(seq_lens), q.shape[1], kv.shape[4]))
    return reference.paged_decode(q, kv, block_table, seq_lens, scale, window, softcap)


def paged_prefill(
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

    q: [T, H, D]; sequence i's new tokens are rows cu_seqlens[i] .. cu_seqlens[i + 1] (int32 [S + 1]) and the last of
    its ``seq_lens[i]`` tokens. The rest is as in ``paged_decode``. Returns [T, H, D].
    """
    _attention(q, kv, block_table, seq_lens)
    _shape("q", q, (len(q), q.shape[1], kv.shape[4]))
    _shape("cu_seqlens", cu_seqlens, (len(seq_lens) + 1,))
    return reference.paged_prefill(q, kv, block_table, cu_seqlens, seq_lens, scale, window, softcap)


def rope(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotates ``x [T, heads, D]`` in place by each token's position (``positions [T]`` int64).

    cos_sin: [max_position, D] float32, D/2 cosines then D/2 sines. Element i is paired with element i + D/2, as in
    the Hugging Face layout of weights.
    """
    _dtype("cos_sin", cos_sin, torch.float32)
    _shape("cos_sin", cos_sin, (len(cos_sin), x.shape[2]))
    _shape("positions", positions, (len(x),))
    reference.rope(x, cos_sin, positions)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; weight [x.shape[-1]]."""
    _shape("weight", weight, (x.shape[-1],))
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to ``residual`` in place and returns the norm of that."""
    _shape("weight", weight, (x.shape[-1],))
    _shape("residual", residual, x.shape)
    return reference.add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2 * I]``, gate in the first half. Returns [T, I]."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns, not an even number")
    return reference.silu_mul(gate_up)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id per row of ``logits [S, V]``: [S] int64, a function of the row, its seed and its position alone.

    temperature (0 is greedy), top_p and min_p: [S] float32; top_k (0 is off), seeds and positions: [S] int64. After
    dividing by temperature, min_p drops tokens less likely than min_p times the likeliest, then top_k keeps the
    likeliest k, then top_p the fewest of those that hold at least top_p of their probability.
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
    return reference.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)


def _attention(q: torch.Tensor, kv: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
    _kv(kv)
    _dtype("q", q, kv.dtype)
    _dtype("block_table", block_table, torch.int32)
    _dtype("seq_lens", seq_lens, torch.int32)
    if block_table.dim() != 2 or len(block_table) != len(seq_lens):
        raise ValueError(f"block_table has shape {tuple(block_table.shape)}, not ({len(seq_lens)}, max_blocks)")
    if q.dim() != 3 or q.shape[1] % kv.shape[2]:
        raise ValueError(f"q has shape {tuple(q.shape)}: heads must be a multiple of the {kv.shape[2]} of kv")


def _kv(kv: torch.Tensor) -> None:
    if kv.dim() != 5 or kv.shape[1] != 2 or not kv.is_contiguous():
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}, not a contiguous (blocks, 2, kv_heads, block_size, head_dim)"
        )


def _shape(name: str, tensor: torch.Tensor, wanted: tuple[int, ...] | torch.Size) -> None:
    if tensor.shape != tuple(wanted):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(wanted)}")


def _dtype(name: str, tensor: torch.Tensor, wanted: torch.dtype) -> None:
    if tensor.dtype != wanted:
        raise ValueError(f"{name} is {tensor.dtype}, not {wanted}")
