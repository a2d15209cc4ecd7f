"""The block ledger: who holds each block, why, and since when; and what each waiting sequence waits for."""

from __future__ import annotations

from itertools import islice
from typing import Any

from services.scheduler.block_pool import BlockState
from services.scheduler.request import Sequence
from services.scheduler.scheduler import Scheduler

PAGE = 64  # blocks or waiting sequences of one answer, so that no question holds up a step
OWNERS_SHOWN = 16  # of a block, for the same reason; ``references`` counts them all


def page(scheduler: Scheduler, cursor: int, now: float, wall: float) -> tuple[dict[str, Any], int]:
    """One page of the ledger, and the cursor of the next (0: that was the last).

    A cursor up to the last block is a block; beyond, a place among the waiting sequences. ``now`` is the scheduler's
    clock and ``wall`` Unix seconds, both of this moment: times are told as Unix seconds.
    """
    pool = scheduler.pool
    first_waiting = pool.num_usable + 1
    body: dict[str, Any] = {
        "usable": pool.num_usable,
        "used": pool.num_used,
        "cached": pool.num_cached,
        "free": pool.num_free,
        "block_size": scheduler.limits.block_size,
        "blocks": [],
        "waiting": [],
    }
    cursor = max(cursor, 1)
    if cursor < first_waiting:
        end = min(cursor + PAGE, first_waiting)
        body["blocks"] = [_block(scheduler, block, wall - now) for block in range(cursor, end)]
        return body, end if end < first_waiting or scheduler.queues.num_waiting else 0
    start = cursor - first_waiting
    body["waiting"] = [
        {
            **_name(sequence),
            "waits_for": scheduler.admission.waits_for(sequence),
            "since": sequence.request.arrived + wall - now,
        }
        for sequence in islice(scheduler.queues.all_waiting(), start, start + PAGE)
    ]
    following = cursor + PAGE
    return body, following if following - first_waiting < scheduler.queues.num_waiting else 0


def filled_slots(scheduler: Scheduler) -> int:
    """Token slots in use that hold a token, or will once the steps in flight have run; a shared one counts once."""
    size, pool = scheduler.limits.block_size, scheduler.pool
    filled: dict[int, int] = {}  # of each table's last block, the only one that may not be full
    leaving = [sequence for step in scheduler.steps for sequence in step.vacated]
    between = (*scheduler.beams.between(), *scheduler.swaps.leaving)  # hold blocks without a slot
    for sequence in (*scheduler.rows.occupants(), *between, *leaving):
        if sequence.blocks:
            last = len(sequence.blocks) - 1
            most = filled.get(sequence.blocks[last], 0)
            filled[sequence.blocks[last]] = max(most, _filled(scheduler, sequence, last))
    return (pool.num_used - len(filled)) * size + sum(filled.values())


def _filled(scheduler: Scheduler, sequence: Sequence, index: int) -> int:
    """How many slots of a block of its table a sequence has filled."""
    size, slot = scheduler.limits.block_size, sequence.slot
    if slot < 0:
        length = sequence.num_tokens
    else:
        length = int(scheduler.rows.length[slot]) if scheduler.rows.decoding[slot] else sequence.computed
    return min(max(length - index * size, 0), size)


def _block(scheduler: Scheduler, block: int, offset: float) -> dict[str, Any]:
    pool, cache = scheduler.pool, scheduler.tables.cache
    state, entry = pool.state(block), cache.entry_of(block)
    row: dict[str, Any] = {
        "block": block,
        "state": state.value,
        "since": pool.since(block) + offset,
        "why": pool.why(block),
        "references": pool.references(block),
        "owners": [_owner(owner) for owner in pool.owners(block)[:OWNERS_SHOWN]],
        "key": None if entry is None else entry.key.hex(),
    }
    if state is BlockState.USED:
        owners = [owner for owner in pool.owners(block) if type(owner) is not int]
        fills = (_filled(scheduler, owner, owner.blocks.index(block)) for owner in owners)
        row["filled"] = scheduler.limits.block_size if entry is not None else max(fills, default=0)
    if state is not BlockState.FREE and entry is not None and entry.parent is not None:
        row["parent"] = entry.parent.block
    return row


def _owner(owner: Any) -> dict[str, Any]:
    return {"copied_in_step": owner} if type(owner) is int else {**_name(owner), "state": owner.state.value}


def _name(sequence: Sequence) -> dict[str, Any]:
    request = sequence.request
    return {"request_id": request.request_id, "rid": request.rid, "seq": sequence.index}
