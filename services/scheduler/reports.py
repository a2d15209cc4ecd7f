"""Answers to QUERY: metrics of all processes, and the scheduler's status."""

from __future__ import annotations

import time
from typing import Any

from services.scheduler.scheduler import Scheduler
from shared.peers import Peer
from shared.wire import Query, Reply, Roster

PAGE = 64  # entries of a long answer sent at once, so that no question holds up a step


def page(query: Query, entries: list[Any]) -> tuple[list[Any], int]:
    """The entries from the query's cursor on, and the cursor of the next page (0: that was the last)."""
    start = max(query.cursor, 0)
    following = start + PAGE
    return entries[start:following], following if following < len(entries) else 0


def metrics(query: Query, snapshots: list[dict[str, Any]]) -> Reply:
    body, following = page(query, snapshots)
    return Reply(query.number, 200, body, following)


def status(
    query: Query, epoch: int, ranks: list[int], roster: Roster, clients: list[Peer], core: Scheduler | None
) -> Reply:
    now = time.monotonic()
    shown, following = page(query, clients)
    body: dict[str, Any] = {
        "ready": core is not None,
        "scheduler_epoch": epoch,
        "ranks": ranks,
        "roster": dict(zip(roster.identities, roster.addresses, strict=True)),
        "roster_version": roster.version,
        "clients": [
            {
                "identity": peer.raw.decode(),
                "client_number": peer.client_number,
                "progress": peer.progress,
                "lag": peer.lag,
                "heard": now - peer.heard,
            }
            for peer in shown
        ],
    }
    if core is not None:
        load = core.load
        body |= {
            "worker_epoch": core.worker_epoch,
            "running": load.running,
            "waiting": load.waiting,
            "preempted": load.preempted,
            "requests": len(core.streams.requests),
            "blocks_used": load.blocks_used,
            "blocks_total": load.blocks_total,
            "steps_in_flight": [step.step_id for step in core.steps],
            "last_step": core.last_step,
            "max_model_len": core.limits.max_model_len,
        }
    return Reply(query.number, 200, body, following)


def unknown(query: Query) -> Reply:
    message = f"the scheduler cannot answer {query.what!r}; it can: metrics, status"
    return Reply(query.number, 404, {"message": message, "code": "not_found", "param": "what"})
