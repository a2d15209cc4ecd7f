"""Attention over paged KV in torch: gather by block table, then batched matrix products.

Scores, softmax and sums are float32. What a row does not see is never trusted: blocks are reused without being cleared,
and 0 * NaN would poison the output, so gathered values there are replaced, not only their scores.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.kv import dequantized

# A group of decode rows is padded to its longest. Splitting costs about as much as this many padded blocks.
_PADDING_BLOCKS = 64
_GROUP_BLOCKS = 1024


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Attention of one query a sequence, ``q [S, H, D]``; arguments and result as in ``kernels.ops``.

    The block-table walk of PagedAttention, all blocks at once: (1) look-up, a gather of each row's blocks by its table;
    (2) partial scores, one batched product with all its keys; (3) softmax, which knows maximum and denominator without
    running ones; (4) accumulate, a second product. Rows of similar length go together, padded to the longest.
    """
    block_size = kv.shape[3]
    first = torch.zeros_like(seq_lens)
    if window:
        first = (seq_lens - window).clamp_(min=0) // block_size
    blocks = (seq_lens + block_size - 1) // block_size - first
    out = torch.zeros_like(q)
    for rows, width in _groups(blocks.tolist()):
        index = torch.tensor(rows, device=q.device)
        out[index] = _decode_group(
            q[index],
            kv,
            block_table[index],
            seq_lens[index],
            first[index],
            blocks[index],
            width,
            scale,
            window,
            softcap,
        )
    return out


def _groups(blocks: list[int]) -> list[tuple[list[int], int]]:
    """Rows of similar length together: (rows, blocks of the longest). Rows without blocks are left out."""
    groups: list[tuple[list[int], int]] = []
    rows: list[int] = []
    width = padding = 0
    for row in sorted((i for i, n in enumerate(blocks) if n > 0), key=lambda i: -blocks[i]):
        if rows and (
            padding + width - blocks[row] > _PADDING_BLOCKS or (len(rows) + 1) * width > max(width, _GROUP_BLOCKS)
        ):
            groups.append((rows, width))
            rows = []
        if not rows:
            width, padding = blocks[row], 0
        padding += width - blocks[row]
        rows.append(row)
    if rows:
        groups.append((rows, width))
    return groups


def _decode_group(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    first: torch.Tensor,
    blocks: torch.Tensor,
    width: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    rows, heads, head_dim = q.shape
    _, _, kv_heads, block_size, row = kv.shape
    columns = torch.arange(width, device=q.device)
    live = columns < blocks.unsqueeze(1)
    table = block_table.gather(1, torch.where(live, columns + first.unsqueeze(1), 0).long())
    table = torch.where(live, table, 0).long()  # block 0 is zeroed padding

    pieces = kv.view(-1, block_size, row)  # one per (block, K or V, head)
    index = (table * (2 * kv_heads)).unsqueeze(1) + torch.arange(kv_heads, device=q.device).view(1, -1, 1)
    keys = dequantized(pieces.index_select(0, index.flatten())).view(rows * kv_heads, width * block_size, head_dim)
    values = dequantized(pieces.index_select(0, (index + kv_heads).flatten()))

    positions = torch.arange(width * block_size, device=q.device) + (first * block_size).unsqueeze(1)
    hidden = positions >= seq_lens.unsqueeze(1)
    if window:
        hidden |= positions < (seq_lens - window).unsqueeze(1)
    by_block = values.view(rows, kv_heads, width, block_size, head_dim)
    _zero(by_block, hidden, blocks.long() - 1)
    if window:
        _zero(by_block, hidden, torch.zeros_like(blocks).long())
    values = values.view(rows * kv_heads, width * block_size, head_dim)

    grouped = q.float().view(rows * kv_heads, heads // kv_heads, head_dim)
    scores = torch.bmm(grouped, keys.float().transpose(1, 2)).mul_(scale).view(rows, heads, -1)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1)
    out = torch.bmm(weights.view(rows * kv_heads, -1, width * block_size), values.float())
    return out.view(rows, heads, head_dim).to(q.dtype)


def _zero(values: torch.Tensor, hidden: torch.Tensor, column: torch.Tensor) -> None:
    """Zeroes the hidden slots of one block of each row: ``values [rows, K, width, block_size, D]``, ``hidden
    [rows, width * block_size]``, ``column [rows]`` int64. Blocks between a row's first and last have none."""
    rows, _, width, block_size, _ = values.shape
    row = torch.arange(rows, device=values.device)
    slots = hidden.view(rows, width, block_size)[row, column]
    values[row, :, column] = values[row, :, column].masked_fill(slots.view(rows, 1, block_size, 1), 0)


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
    """Causal attention of the last tokens of each sequence, ``q [T, H, D]``; arguments, result as in ``kernels.ops``.

    One sequence after another: its blocks are gathered by its table (1), and torch's attention does the rest (2 to 4).
    """
    out = torch.zeros_like(q)
    bounds = cu_seqlens.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        if begin < end:
            out[begin:end] = _prefill_one(q[begin:end], kv, block_table[row], length, scale, window, softcap)
    return out


def _prefill_one(
    q: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, length: int, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """The last ``len(q)`` of ``length`` tokens, each attending to itself and what is before it (within ``window``)."""
    start, block_size = length - len(q), kv.shape[3]
    begin = max(0, start + 1 - window) if window else 0  # what the first query sees first
    first = begin // block_size
    picked = dequantized(kv.index_select(0, table[first : (length + block_size - 1) // block_size].long()))
    live = slice(begin - first * block_size, length - first * block_size)
    keys, values = (
        part.transpose(0, 1).reshape(part.shape[1], -1, part.shape[3])[:, live] for part in picked.unbind(1)
    )
    mask = None
    if start > 0 or window:
        query = torch.arange(start, length, device=q.device).unsqueeze(1)
        key = torch.arange(begin, length, device=q.device)
        mask = key <= query
        if window:
            mask &= key > query - window
    queries = q.transpose(0, 1).to(keys.dtype)
    if softcap:
        return _capped(queries, keys, values, mask, scale, softcap).transpose(0, 1).to(q.dtype)
    attended = F.scaled_dot_product_attention(
        queries.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1).to(q.dtype)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """Attention with scores bounded to ``softcap * tanh(score / softcap)``, which torch's fused one cannot do."""
    heads, tokens, head_dim = q.shape
    if mask is None:
        mask = torch.ones(tokens, k.shape[1], dtype=torch.bool, device=q.device).tril()
    grouped = q.float().view(len(k), -1, tokens, head_dim)
    scores = torch.tanh(grouped @ k.float().transpose(1, 2).unsqueeze(1) * (scale / softcap)) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v.float().unsqueeze(1)).view(heads, tokens, head_dim).to(q.dtype)
