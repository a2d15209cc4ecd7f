"""Compiles what a model will launch before it serves, and counts compiles afterwards.

A kernel is compiled at its first launch with a new specialization: dtypes, shape constants of the model, the tile.
Lengths, widths and counts of a step are not part of it. So one small launch of each form is enough, and a compile after
that is a bug that some request has waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs

from kernels.triton.attention import FEW_ROWS, MIN_SPLIT_TOKENS, paged_decode, paged_prefill
from kernels.triton.fused import add_rms_norm, rms_norm, rope, silu_mul
from kernels.triton.memory import copy_blocks, rope_store, store_kv
from kernels.triton.sampling import sample

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shapes:
    """What of a model its kernels are compiled for, beside the shape of its KV.

    qk_norm: whether heads are normed. softcap: 0 is none.
    """

    heads: int
    hidden: int
    intermediate: int
    vocab: int
    qk_norm: bool = False
    softcap: float = 0.0


def warm_up(shapes: Shapes, kv: torch.Tensor, windows: Iterable[int] = (0,)) -> None:
    """Launches every kernel in every form. windows: those of the model's layers, 0 for none.

    kv is one layer's real KV memory, before it holds anything: on AMD devices a kernel is compiled differently for
    tensors of 2 GiB and more. Nothing but block 1 is written.
    """
    dtype, device = kv.dtype, kv.device
    heads, kv_heads, head_dim = shapes.heads, kv.shape[2], kv.shape[4]
    group = heads // kv_heads
    tokens = FEW_ROWS // group + 2  # more than the few rows that take the smaller tile
    width = 2 * MIN_SPLIT_TOKENS // kv.shape[3]  # more than one piece
    cos_sin = torch.zeros(2, head_dim, device=device)
    table = torch.zeros(2, width, dtype=torch.int32, device=device)
    bounds = torch.tensor([0, 1, tokens], dtype=torch.int32, device=device)
    lens = torch.tensor([1, 2 * MIN_SPLIT_TOKENS], dtype=torch.int32, device=device)
    positions = torch.zeros(tokens, dtype=torch.int64, device=device)
    nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    qkv = torch.zeros(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    row = torch.zeros(tokens, shapes.hidden, dtype=dtype, device=device)

    rms_norm(row, row[0], 1e-6)
    add_rms_norm(row, row.clone(), row[0], 1e-6)
    silu_mul(torch.zeros(tokens, 2 * shapes.intermediate, dtype=dtype, device=device))
    if shapes.qk_norm:
        rms_norm(q, qkv[0, 0], 1e-6)
        rms_norm(k, qkv[0, 0], 1e-6)
    rope(qkv[:, : heads + kv_heads], cos_sin, positions)
    store_kv(k, v, kv, nowhere)
    rope_store(qkv, kv, cos_sin, positions, nowhere)
    for window in windows:
        paged_decode(q[:2], kv, table, lens, 1.0, window, shapes.softcap)
        paged_prefill(q, kv, table, bounds, lens, 1.0, window, shapes.softcap)
    copy_blocks([kv], torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64, device=device))
    real, whole = torch.ones(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for logits_dtype in {dtype, torch.float32}:  # rules on logits make them float32
        logits = torch.zeros(2, shapes.vocab, dtype=logits_dtype, device=device)
        sample(logits, real, whole, real, real, whole, whole)


class CompileWatch:
    """Counts compiles from its start on, and calls ``told`` at each; the first is logged. One a process: Triton has one
    hook."""

    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        self.count = 0
        self._told = told

    def start(self) -> None:
        knobs.runtime.jit_post_compile_hook = self._compiled

    def stop(self) -> None:
        knobs.runtime.jit_post_compile_hook = None

    def _compiled(self, *, fn: Any, **_: Any) -> None:
        self.count += 1
        self._told()
        if self.count == 1:
            log.warning("%s was compiled while serving; the warm-up lacks a form of it", fn.name)
