"""Choosing one token per row by Gumbel-max, with noise that depends on (seed, position, token) alone.

Drawing argmax(logit + Gumbel noise) is drawing from softmax(logits). The noise comes from a hash of its three keys
(splitmix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), so a row samples
the same token wherever in a batch it stands, and however often its step is computed again.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)
_TILE = 8  # rows at a time: int64 noise of a large vocabulary should stay in cache
_LARGEST = 1.0 - 2.0**-24  # the float32 below 1


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    greedy = temperature == 0
    if bool(greedy.any()):
        ids[greedy] = logits[greedy].argmax(-1)
    keys = _mix(_mix(seeds) + positions)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    for rows in torch.split((~greedy & ~filtered).nonzero().squeeze(1), _TILE):
        scaled = logits[rows].float() / temperature[rows, None]
        tokens = torch.arange(logits.shape[1], device=logits.device)
        ids[rows] = (scaled + _gumbel(keys[rows, None], tokens)).argmax(-1)
    for rows in torch.split((~greedy & filtered).nonzero().squeeze(1), _TILE):
        scaled = logits[rows].float() / temperature[rows, None]
        kept, tokens = _filter(scaled, top_k[rows], top_p[rows], min_p[rows])
        choice = (kept + _gumbel(keys[rows, None], tokens)).argmax(-1, keepdim=True)
        ids[rows] = tokens.gather(1, choice).squeeze(1)
    return ids


def filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keep: torch.Tensor,
) -> torch.Tensor:
    """``logits [S, V]`` over their temperatures, in float32, those that ``sample`` leaves out at -inf.

    Greedy rows stay as they are. keep: an id for each row that stays in any case.
    """
    scaled = logits.float() / temperature.masked_fill(temperature == 0, 1)[:, None]
    own = scaled.gather(1, keep[:, None])
    looked_at = (temperature != 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    for rows in torch.split(looked_at.nonzero().squeeze(1), _TILE):
        kept, tokens = _filter(scaled[rows], top_k[rows], top_p[rows], min_p[rows])
        scaled[rows] = torch.empty_like(kept).scatter_(1, tokens, kept)
    return scaled.scatter_(1, keep[:, None], own)


def _filter(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in descending order, those filtered out at -inf, and their token ids.

    In this order: min_p (relative to the most likely token), top_k, then top_p of what is left.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    dropped = ordered < ordered[:, :1] + min_p.log()[:, None]
    dropped |= (rank >= top_k[:, None]) & (top_k > 0)[:, None]
    ordered = ordered.masked_fill(dropped, float("-inf"))
    probabilities = ordered.double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # what the more likely tokens hold
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped[:, 0] = False
    return ordered.masked_fill(dropped, float("-inf")), tokens


def _gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Float32 Gumbel noise. -log(-log1p(-u)) rather than -log(-log(u)): its tail is fine where u is near 0."""
    bits = _mix(keys + tokens * _GOLDEN)
    bits = (bits >> 32).bitwise_and_(0xFFFFFFFF)
    uniform = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64 of each int64 (torch's arithmetic wraps; its right shift is arithmetic, hence the masks)."""
    x = x + _GOLDEN
    x = (x ^ (x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MULTIPLY_1)
    x = (x ^ (x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MULTIPLY_2)
    return x ^ (x >> 31).bitwise_and_((1 << 33) - 1)
