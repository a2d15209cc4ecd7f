"""Attention over paged KV: one walk along a sequence's block table, in two kernels.

The algorithm is PagedAttention's (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4.1): attention of query i over KV blocks j computed block by block as

    A_ij = exp(q_i K_j / sqrt(d)) / sum_t exp(q_i K_t / sqrt(d)),    o_i = sum_j V_j A_ij

with the running maximum and denominator of online softmax (Milakov and Gimelshein, 2018) instead of two passes, and
tiles as in FlashAttention-2 (Dao, 2023). A tile's rows are (query token, query head) pairs of one KV head, so a key
is read once for all the query heads that share it.

Shapes: T tokens, S sequences, H query heads, K KV heads, D elements of a head; KV memory of one layer is
``kv [num_blocks, 2, K, block_size, D]``. Scores, maximum, denominator and accumulator are float32. What an output row
adds up, and in what order, depends on its own sequence alone, never on the batch, so a row has the same bits alone
and in any company.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.lang import cast, dot
from kernels.triton.tiles import Tile, decode_tile, prefill_tile

MAX_SPLITS = 32
"""A sequence is cut into at most this many pieces."""
MIN_SPLIT_TOKENS = 256
"""Pieces are no shorter than this, or merging them would cost more than it gains."""
FEW_ROWS = 64
"""Sequences with at most this many (query token, query head of a group) rows take the decode tile in prefill."""

_LOG2E = tl.constexpr(1.4426950408889634)
_SPLIT_UNIT = tl.constexpr(64)  # pieces are multiples of this, so of every tile
_MAX_SPLITS = tl.constexpr(MAX_SPLITS)
_MIN_SPLIT_TOKENS = tl.constexpr(MIN_SPLIT_TOKENS)

# Integers that vary from step to step: specializing on them (== 1, divisible by 16) would compile while serving.
_VARYING = ["num_seqs", "table_stride", "window", "splits", "least_rows", "most_rows"]
# Small index tensors may be slices of longer ones, at any address.
_UNALIGNED = ["block_table", "cu_seqlens", "seq_lens"]


@triton.jit
def _walk(
    acc,
    peak,
    total,
    q,
    query_at,
    keys,
    values,
    table,
    begin,
    end,
    low,
    window,
    scale,
    softcap,
    block_stride,
    token_stride,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The block-table walk: attends rows ``q [M, D]`` to tokens ``begin .. end`` of one sequence and KV head.

    1. Look-up: position p's key and value are in slot ``p % BLOCK_SIZE`` of physical block ``table[p // BLOCK_SIZE]``.
    2. Partial scores: ``q @ keys^T`` of the tile, scaled, capped, and hidden (-inf) where a row may not look.
    3. Running maximum and denominator: ``peak`` and ``total`` of each row; what was added up before under a smaller
       maximum is scaled down.
    4. Accumulate: ``acc += exp2(scores - peak) @ values``.

    Only positions ``low .. end`` are read, of the table too: what memory holds elsewhere may be NaN, and 0 * NaN is.
    query_at [M]: each row's own position. Scores are in units of log2(e), so that exponentials are exp2.
    """
    pad: tl.constexpr = q.shape[1]
    rows: tl.constexpr = q.shape[0]
    element = tl.arange(0, pad)
    for start in tl.range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        live = (at >= low) & (at < end)
        if MASKED:
            block = tl.load(table + at // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        else:
            block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        slot = block * block_stride + (at % BLOCK_SIZE) * token_stride
        if MASKED:
            k = tl.load(
                keys + slot[None, :] + element[:, None], mask=live[None, :] & (element < HEAD_DIM)[:, None], other=0.0
            )
        elif pad == HEAD_DIM:
            k = tl.load(keys + slot[None, :] + element[:, None])
        else:
            k = tl.load(keys + slot[None, :] + element[:, None], mask=(element < HEAD_DIM)[:, None], other=0.0)
        scores = dot(q, k, tl.zeros([rows, TILE], tl.float32)) * scale
        if SOFTCAP:
            # tanh(|x|) = (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)): never overflows, and there is no tanh on every device
            small = tl.exp(-2.0 * tl.abs(scores) / softcap)
            capped = softcap * (1.0 - small) / (1.0 + small)
            scores = tl.where(scores < 0, -capped, capped)
        scores = scores * _LOG2E
        if MASKED:
            seen = live[None, :]
            if CAUSAL:
                seen = seen & (at[None, :] <= query_at[:, None])
            if WINDOW:
                seen = seen & (at[None, :] > query_at[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(highest > float("-inf"), highest, 0.0)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(peak - base)
        total = total * rescale + tl.sum(weights, 1)
        if MASKED:
            v = tl.load(
                values + slot[:, None] + element[None, :], mask=live[:, None] & (element < HEAD_DIM)[None, :], other=0.0
            )
        elif pad == HEAD_DIM:
            v = tl.load(values + slot[:, None] + element[None, :])
        else:
            v = tl.load(values + slot[:, None] + element[None, :], mask=(element < HEAD_DIM)[None, :], other=0.0)
        acc = dot(cast(weights, v.dtype), v, acc * rescale[:, None])
        peak = highest
    return acc, peak, total


@triton.jit
def _normalize(acc, total):
    """A row that saw nothing (padding, length 0) becomes zeros, never NaN."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _find_sequence(cu_seqlens, tile, num_seqs, TILE_TOKENS: tl.constexpr):
    """Which sequence query tile ``tile`` belongs to: sequence i's tiles start at cu_seqlens[i] // TILE_TOKENS + i."""
    lowest = 0
    highest = num_seqs
    while lowest < highest:
        middle = (lowest + highest) // 2
        first = tl.load(cu_seqlens + middle) // TILE_TOKENS + middle
        if first <= tile:
            lowest = middle + 1
        else:
            highest = middle
    return lowest - 1


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def prefill_kernel(
    out,
    q,
    kv,
    block_table,
    cu_seqlens,
    seq_lens,
    scale,
    softcap,
    num_seqs,
    table_stride,
    window,
    least_rows,
    most_rows,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    kv_block_stride,
    kv_part_stride,
    kv_head_stride,
    kv_token_stride,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Causal attention of a ragged batch: prompts, chunks of prompts, single tokens. Program: (query tile, KV head).

    The grid ``T // (ROWS // GROUP) + S`` is an upper bound that needs no query length on the host; a program finds its
    sequence by binary search and leaves if it is past that sequence's end. The walk (look-up, partial scores, running
    maximum and denominator, accumulate) is ``_walk``'s, over the tiles that every row sees whole, then, masked, over
    those at the diagonal. Sequences with fewer than ``least_rows`` or more than ``most_rows`` rows of a head are left
    to the launch with the other tile.
    """
    tile_tokens: tl.constexpr = ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a sequence have most to read: they go first
    kv_head = tl.program_id(1)
    seq = _find_sequence(cu_seqlens, tile, num_seqs, tile_tokens)
    first = tl.load(cu_seqlens + seq)
    count = tl.load(cu_seqlens + seq + 1) - first
    offset = (tile - (first // tile_tokens + seq)) * tile_tokens
    if offset >= count:
        return
    if (count * GROUP < least_rows) | (count * GROUP > most_rows):
        return
    length = tl.load(seq_lens + seq)

    row = tl.arange(0, ROWS)
    element = tl.arange(0, HEAD_PAD)
    token = offset + row // GROUP
    head = kv_head * GROUP + row % GROUP
    alive = (row < tile_tokens * GROUP) & (token < count)
    mask = alive[:, None] & (element < HEAD_DIM)[None, :]
    index = (first + token).to(tl.int64)
    query = tl.load(
        q + (index * q_token_stride + head * q_head_stride)[:, None] + element[None, :], mask=mask, other=0.0
    )

    query_at = length - count + token
    first_at = length - count + offset
    end = tl.minimum(length, first_at + tile_tokens)
    low = 0
    whole = tl.maximum(first_at + 1, 0) // TILE * TILE  # before this, every row sees every token
    if WINDOW:
        low = tl.maximum(first_at - window + 1, 0)
        whole = low // TILE * TILE

    table = block_table + seq.to(tl.int64) * table_stride
    keys = kv + kv_head.to(tl.int64) * kv_head_stride
    values = keys + kv_part_stride
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if not WINDOW:
        acc, peak, total = _walk(
            acc, peak, total, query, query_at, keys, values, table, 0, whole, 0, window, scale, softcap,
            kv_block_stride, kv_token_stride, False, True, WINDOW, SOFTCAP, TILE, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
    acc, peak, total = _walk(
        acc, peak, total, query, query_at, keys, values, table, whole, end, low, window, scale, softcap,
        kv_block_stride, kv_token_stride, True, True, WINDOW, SOFTCAP, TILE, HEAD_DIM, BLOCK_SIZE,
    )  # fmt: skip
    tl.store(
        out + (index * out_token_stride + head * out_head_stride)[:, None] + element[None, :],
        cast(_normalize(acc, total), out.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _split(length, window, WINDOW: tl.constexpr):
    """How a sequence of ``length`` tokens is cut: (first token, tokens a piece, pieces); a function of it alone."""
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - window, 0) // _SPLIT_UNIT * _SPLIT_UNIT
    least = tl.cdiv(tl.cdiv(length - begin, _MAX_SPLITS), _SPLIT_UNIT) * _SPLIT_UNIT
    tokens = tl.maximum(least, _MIN_SPLIT_TOKENS)
    return begin, tokens, tl.maximum(tl.cdiv(length - begin, tokens), 1)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def decode_kernel(
    out,
    partial,
    stats,
    q,
    kv,
    block_table,
    seq_lens,
    scale,
    softcap,
    table_stride,
    window,
    splits,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    kv_block_stride,
    kv_part_stride,
    kv_head_stride,
    kv_token_stride,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Attention of one query token a sequence. Program: (sequence, KV head, every n-th piece of the sequence).

    A sequence is cut by its own length alone (``_split``). The walk over a piece (look-up, partial scores, running
    maximum and denominator, accumulate) is ``_walk``'s, from an empty state, so its bits do not depend on which
    program runs it. Of several pieces each leaves its accumulator in ``partial [S, H, splits, D]`` and (maximum,
    denominator) in ``stats [S, H, splits, 2]``, both float32, for ``merge_kernel``; a single one is the answer.
    """
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(seq_lens + seq)
    begin, tokens, pieces = _split(length, window, WINDOW)

    row = tl.arange(0, ROWS)
    element = tl.arange(0, HEAD_PAD)
    head = kv_head * GROUP + row
    alive = row < GROUP
    mask = alive[:, None] & (element < HEAD_DIM)[None, :]
    query = tl.load(q + seq * q_token_stride + (head * q_head_stride)[:, None] + element[None, :], mask=mask, other=0.0)
    query_at = tl.zeros([ROWS], tl.int32) + (length - 1)
    low = 0
    if WINDOW:
        low = tl.maximum(length - window, 0)

    table = block_table + seq * table_stride
    keys = kv + kv_head.to(tl.int64) * kv_head_stride
    values = keys + kv_part_stride
    for piece in range(tl.program_id(2), pieces, tl.num_programs(2)):
        start = begin + piece * tokens
        end = tl.minimum(start + tokens, length)
        acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc, peak, total = _walk(
            acc, peak, total, query, query_at, keys, values, table, start, end, low, window, scale, softcap,
            kv_block_stride, kv_token_stride, True, False, False, SOFTCAP, TILE, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        if pieces == 1:
            tl.store(
                out + seq * out_token_stride + (head * out_head_stride)[:, None] + element[None, :],
                cast(_normalize(acc, total), out.dtype.element_ty),
                mask=mask,
            )
        else:
            place = (seq * HEADS + head) * splits + piece
            tl.store(partial + place[:, None] * HEAD_DIM + element[None, :], acc, mask=mask)
            tl.store(stats + place * 2, peak, mask=alive)
            tl.store(stats + place * 2 + 1, total, mask=alive)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def merge_kernel(
    out,
    partial,
    stats,
    seq_lens,
    window,
    splits,
    out_token_stride,
    out_head_stride,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Joins the pieces ``decode_kernel`` left of a sequence. Program: (sequence, query head).

    The last step of the walk: pieces' accumulators and denominators are scaled to the highest of their maxima and
    added up. Always over MAX_SPLITS places, absent ones empty, so that the order of additions is fixed.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, _, pieces = _split(tl.load(seq_lens + seq), window, WINDOW)
    if pieces == 1:
        return
    piece = tl.arange(0, _MAX_SPLITS)
    element = tl.arange(0, HEAD_PAD)
    present = piece < pieces
    place = (seq * HEADS + head) * splits + piece
    peak = tl.load(stats + place * 2, mask=present, other=float("-inf"))
    weight = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(stats + place * 2 + 1, mask=present, other=0.0) * weight, 0)
    mask = present[:, None] & (element < HEAD_DIM)[None, :]
    acc = tl.load(partial + place[:, None] * HEAD_DIM + element[None, :], mask=mask, other=0.0)
    acc = tl.sum(acc * weight[:, None], 0) / total
    tl.store(
        out + seq * out_token_stride + head * out_head_stride + element,
        cast(acc, out.dtype.element_ty),
        mask=element < HEAD_DIM,
    )


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Attention of one new token a sequence, ``q [S, H, D]``; arguments and result as in ``kernels.ops``.

    No value is read on the host, so it can be captured in a CUDA graph. Scratch memory: at most MAX_SPLITS float32
    copies of the result.
    """
    seqs, heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[2:4]
    out = torch.empty((seqs, heads, head_dim), dtype=q.dtype, device=q.device)
    if not seqs:
        return out
    tile = decode_tile(head_dim, q.dtype)
    pad = _head_pad(head_dim)
    splits = min(MAX_SPLITS, max(1, -(-block_table.shape[1] * block_size // MIN_SPLIT_TOKENS)))
    partial = torch.empty((seqs, heads, splits, head_dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((seqs, heads, splits, 2), dtype=torch.float32, device=q.device)
    programs = min(splits, max(1, -(-_wanted_programs(q.device) // (seqs * kv_heads))))
    decode_kernel[(seqs, kv_heads, programs)](
        out, partial, stats, q, kv, block_table, seq_lens, float(scale), float(softcap),
        block_table.stride(0), window, splits, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        WINDOW=window > 0, SOFTCAP=softcap > 0, HEADS=heads, GROUP=heads // kv_heads,
        ROWS=_rows(tile, heads // kv_heads), TILE=tile.tokens, HEAD_DIM=head_dim, HEAD_PAD=pad, BLOCK_SIZE=block_size,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(seqs, heads)](
            out, partial, stats, seq_lens, window, splits, out.stride(0), out.stride(1),
            WINDOW=window > 0, HEADS=heads, HEAD_DIM=head_dim, HEAD_PAD=pad, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out


def paged_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Causal attention of several new tokens a sequence, ``q [T, H, D]``; arguments and result as in ``kernels.ops``.

    No value is read on the host. Sequences with few new tokens take the decode tile, the others the prefill tile, in
    a launch each: a sequence's tile depends on its own chunk, not on its company. Rows from cu_seqlens[S] on are left
    as they are.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[2:4]
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    seqs, group = len(seq_lens), heads // kv_heads
    if not tokens or not seqs:
        return out
    few, many = decode_tile(head_dim, q.dtype), prefill_tile(head_dim, q.dtype)
    launches = [(few, 0, FEW_ROWS), (many, FEW_ROWS + 1, 1 << 30)]
    if tokens * group <= FEW_ROWS:
        launches = launches[:1]
    elif seqs == 1:
        launches = launches[1:]
    for tile, least_rows, most_rows in launches:
        rows = _rows(tile, group)
        prefill_kernel[(tokens // (rows // group) + seqs, kv_heads)](
            out, q, kv, block_table, cu_seqlens, seq_lens, float(scale), float(softcap), seqs,
            block_table.stride(0), window, least_rows, most_rows,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1),
            kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
            WINDOW=window > 0, SOFTCAP=softcap > 0, GROUP=group, ROWS=rows, TILE=tile.tokens,
            HEAD_DIM=head_dim, HEAD_PAD=_head_pad(head_dim), BLOCK_SIZE=block_size,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def _head_pad(head_dim: int) -> int:
    """Tensor cores multiply 16 elements at a time, and a tile's sides are powers of two."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def _rows(tile: Tile, group: int) -> int:
    return max(tile.rows, int(triton.next_power_of_2(group)))


def _wanted_programs(device: torch.device) -> int:
    """Enough programs to fill the device a few times over. Only speed depends on it."""
    if device.type != "cuda":
        return 8
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)
