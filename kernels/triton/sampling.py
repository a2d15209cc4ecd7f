"""Choosing one token per row by Gumbel-max, with the noise of ``kernels.reference.sampling``.

Drawing argmax(logit + Gumbel noise) is drawing from softmax(logits). The noise is a hash (splitmix64) of the row's
seed, its position and the token id, so a row samples the same token wherever in a batch it stands.

Filters need no sort. Float32 logits are mapped to integers of the same order, and a row's cut-off is found one bit at
a time, from the highest: is what lies above still k tokens, or top_p of the probability? Of tokens exactly at the
cut-off those of lowest id stay, as in a stable descending sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.lang import INTERPRET

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST = tl.constexpr(1.0 - 2.0**-24)  # the float32 below 1
_CUT_TOKENS = 2048
_DRAW_TOKENS = 4096


@triton.jit
def _mix(x):
    """splitmix64 of each uint64."""
    x = x + tl.full([1], _GOLDEN, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full([1], _MULTIPLY_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([1], _MULTIPLY_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _gumbel(key, token):
    """Float32 Gumbel noise -log(-log1p(-u)) of ``token`` ids, u uniform; its tail is fine where u is near 0.

    There is no log1p on every device: log1p(x) = x log(1 + x) / ((1 + x) - 1), right where 1 + x rounds (Kahan).
    """
    bits = _mix(key + token.to(tl.uint64) * tl.full([1], _GOLDEN, tl.uint64))
    uniform = (bits >> 32).to(tl.uint32).to(tl.float32)
    uniform = tl.minimum((uniform + 0.5) * 2.3283064365386963e-10, _LARGEST)
    less = 1.0 - uniform
    rounded = 1.0 - less
    ratio = tl.where(rounded > 0, uniform / tl.where(rounded > 0, rounded, 1.0), 1.0)
    exponential = tl.where(rounded > 0, -tl.log(less) * ratio, uniform)
    return -tl.log(exponential)


@triton.jit
def _scaled(logits, token, vocab, temperature):
    """Logits over temperature, divided as IEEE 754 says so that every pass and every device agrees on ties."""
    value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if INTERPRET:
        return value / temperature
    else:
        return tl.div_rn(value, tl.zeros_like(value) + temperature)


@triton.jit
def _order(value):
    """float32 as int64 0 .. 2^32 - 1 of the same order."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int64) + 2147483648


@triton.jit
def _unorder(key):
    bits = (key - 2147483648).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _count_from(logits, vocab, temperature, key, TOKENS: tl.constexpr):
    """How many tokens of a row are at ``key`` or above."""
    token = tl.arange(0, TOKENS)
    count = tl.zeros([TOKENS], tl.int32)
    for start in range(0, vocab, TOKENS):
        at = start + token
        count += ((_order(_scaled(logits, at, vocab, temperature)) >= key) & (at < vocab)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _mass_from(logits, vocab, temperature, most, key, TOKENS: tl.constexpr):
    """exp(logit - most) of the tokens of a row that are at ``key`` or above, in sum."""
    token = tl.arange(0, TOKENS)
    mass = tl.zeros([TOKENS], tl.float32)
    for start in range(0, vocab, TOKENS):
        at = start + token
        value = _scaled(logits, at, vocab, temperature)
        mass += tl.where((_order(value) >= key) & (at < vocab), tl.exp(value - most), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _top_k(logits, vocab, temperature, top_k, cut, TOKENS: tl.constexpr):
    """Where top_k cuts, at ``cut`` or above: (key, how many tokens of exactly this key stay).

    The greatest key at which k tokens lie at or above it, one bit after another from the highest.
    """
    kth = tl.full([], 0, tl.int64)
    for bit in range(32):
        trial = kth + (tl.full([], 1, tl.int64) << (31 - bit))
        if _count_from(logits, vocab, temperature, trial, TOKENS) >= top_k:
            kth = trial
    ties = tl.full([], 0, tl.int64) + vocab
    if kth > cut:
        ties = top_k - _count_from(logits, vocab, temperature, kth + 1, TOKENS)
        cut = kth
    return cut, ties


@triton.jit
def _top_p(logits, vocab, temperature, most, top_p, cut, ties, TOKENS: tl.constexpr):
    """Where top_p cuts what other filters have left, as ``_top_k`` does; most: the row's largest logit.

    The greatest key above their cut-off at which the tokens from it up hold the wanted mass; where there is none, their
    cut-off, of whose ties perhaps not all are needed.
    """
    at_cut = tl.exp(_unorder(cut) - most)
    above = _count_from(logits, vocab, temperature, cut + 1, TOKENS)
    ties = tl.minimum(ties, (_count_from(logits, vocab, temperature, cut, TOKENS) - above).to(tl.int64))
    mass = _mass_from(logits, vocab, temperature, most, cut + 1, TOKENS)
    wanted = top_p * (mass + tl.where(ties > 0, at_cut * ties.to(tl.float32), 0.0))
    found = tl.full([], 0, tl.int64)
    for bit in range(32):
        trial = found + (tl.full([], 1, tl.int64) << (31 - bit))
        if (_mass_from(logits, vocab, temperature, most, trial, TOKENS) >= wanted) | (trial <= cut):
            found = trial
    lacking = wanted - _mass_from(logits, vocab, temperature, most, found + 1, TOKENS)
    needed = tl.maximum(tl.ceil(lacking / tl.exp(_unorder(found) - most)), 1.0).to(tl.int64)
    if found > cut:
        ties = needed
    else:
        ties = tl.minimum(ties, needed)
    return found, ties


@triton.jit
def _last_tie(logits, vocab, temperature, cut, ties, TOKENS: tl.constexpr):
    """The id of the last of the first ``ties`` tokens at exactly ``cut``; -1 where there are none."""
    token = tl.arange(0, TOKENS)
    seen = tl.full([], 0, tl.int64)
    last = tl.full([], -1, tl.int64)
    for start in range(0, vocab, TOKENS):
        at = start + token
        tied = (_order(_scaled(logits, at, vocab, temperature)) == cut) & (at < vocab)
        rank = seen + tl.cumsum(tied.to(tl.int32), 0).to(tl.int64)
        last = tl.maximum(last, tl.max(tl.where(tied & (rank <= ties), at, -1), 0).to(tl.int64))
        seen += tl.sum(tied.to(tl.int32), 0).to(tl.int64)
    return last


@triton.jit(
    do_not_specialize=["vocab"],
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps"],
)
def cut_kernel(
    cut_keys,
    cut_tokens,
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    vocab,
    row_stride,
    TOKENS: tl.constexpr,
):
    """Program r finds row r's cut-off: tokens of a higher key stay, and at it those of id up to ``cut_tokens[r]``.

    In this order: min_p (relative to the most likely token), top_k, then top_p of what is left.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    if not filtered:
        tl.store(cut_keys + row, -1)
        tl.store(cut_tokens + row, vocab)
        return
    logits += row * row_stride
    token = tl.arange(0, TOKENS)
    highest = tl.full([TOKENS], float("-inf"), tl.float32)
    for start in range(0, vocab, TOKENS):
        highest = tl.maximum(highest, _scaled(logits, start + token, vocab, temperature))
    most = tl.max(highest, 0)

    cut = tl.full([], 0, tl.int64)
    ties = tl.full([], 0, tl.int64) + vocab  # how many tokens of exactly this key stay
    if min_p > 0:
        # the least key at or above the limit, which itself may lie between two
        cut = _order(most + tl.log(min_p))
    if (top_k > 0) & (top_k < vocab):
        cut, ties = _top_k(logits, vocab, temperature, top_k, cut, TOKENS)
    if top_p < 1:
        cut, ties = _top_p(logits, vocab, temperature, most, top_p, cut, ties, TOKENS)
    tl.store(cut_keys + row, cut)
    tl.store(cut_tokens + row, _last_tie(logits, vocab, temperature, cut, ties, TOKENS))


@triton.jit(do_not_specialize=["vocab", "parts"], do_not_specialize_on_alignment=["temperatures", "seeds", "positions"])
def draw_kernel(
    best_values,
    best_tokens,
    cut_keys,
    cut_tokens,
    logits,
    temperatures,
    seeds,
    positions,
    vocab,
    parts,
    row_stride,
    TOKENS: tl.constexpr,
):
    """Program (r, part): the best token of one part of row r's vocabulary, noise added unless the row is greedy."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    token = part * TOKENS + tl.arange(0, TOKENS)
    logits += row * row_stride
    if temperature == 0:
        value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    else:
        value = _scaled(logits, token, vocab, temperature)
        key = _order(value)
        cut = tl.load(cut_keys + row)
        stays = (key > cut) | ((key == cut) & (token <= tl.load(cut_tokens + row)))
        seed = tl.load(seeds + row + tl.zeros([1], tl.int32)).to(tl.uint64)
        position = tl.load(positions + row + tl.zeros([1], tl.int32)).to(tl.uint64)
        noise = _gumbel(_mix(_mix(seed) + position), token)
        value = tl.where(stays, value + noise, float("-inf"))
    value = tl.where(value == value, value, float("-inf"))  # a NaN logit is never the best, so an id always is one
    best = tl.max(value, 0)
    tl.store(best_values + row * parts + part, best)
    tl.store(best_tokens + row * parts + part, tl.min(tl.where(value == best, token, vocab), 0).to(tl.int64))


@triton.jit(do_not_specialize=["parts"])
def pick_kernel(out, best_values, best_tokens, parts, PAD: tl.constexpr):
    """Program r: the best of row r's parts; of equals, the lowest token."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PAD)
    value = tl.load(best_values + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(best_tokens + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    tl.store(out + row, tl.min(tl.where((value == tl.max(value, 0)) & (part < parts), token, 0x7FFFFFFF), 0))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token id per row of ``logits [S, V]``: [S] int64; arguments as in ``kernels.ops``. Nothing is read on the
    host, so it can be captured in a CUDA graph."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    parts = triton.cdiv(vocab, _DRAW_TOKENS)
    # one tensor each: a slice of another lies at an address that varies with the batch, and so would the specialization
    cut_keys = torch.empty(rows, dtype=torch.int64, device=logits.device)
    cut_tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    best_values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    stride = logits.stride(0)
    cut_kernel[(rows,)](
        cut_keys, cut_tokens, logits, temperature, top_k, top_p, min_p, vocab, stride, TOKENS=_CUT_TOKENS, num_warps=16
    )
    draw_kernel[(rows, parts)](
        best_values, best_tokens, cut_keys, cut_tokens, logits, temperature, seeds, positions, vocab, parts, stride,
        TOKENS=_DRAW_TOKENS, num_warps=8,
    )  # fmt: skip
    pick_kernel[(rows,)](out, best_values, best_tokens, parts, PAD=triton.next_power_of_2(parts), num_warps=1)
    return out
