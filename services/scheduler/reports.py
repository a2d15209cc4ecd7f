"""Answers to QUERY: metrics of all processes, the scheduler's status, the block ledger, the prefix cache's reasons."""

from __future__ import annotations

import time
from typing import Any

from services.scheduler.ledger import page as block_page
from services.scheduler.prefix_cache import pack
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
        load, shares = core.load, core.queues.waiting.shares
        body |= {
            "worker_epoch": core.worker_epoch,
            "running": load.running,
            "waiting": load.waiting,
            "preempted": load.preempted,
            "requests": len(core.streams.requests),
            "blocks_used": load.blocks_used,
            "blocks_cached": load.blocks_cached,
            "blocks_total": load.blocks_total,
            "steps_in_flight": [step.step_id for step in core.steps],
            "last_step": core.last_step,
            "max_model_len": core.limits.max_model_len,
            "blocks_logical": load.blocks_logical,
            "host_blocks_used": load.host_blocks_used,
            "host_blocks_total": core.swaps.host.num_blocks,
            "scheduling_policy": core.limits.scheduling_policy,
            "waiting_by_reason": core.admission.waiting_by_reason(),
            "tenants": shares.counters() if shares is not None else {},
            "preemption": core.preemption.status(),
            "step_seconds": core.costs.status(),
        }
    return Reply(query.number, 200, body, following)


def ledger(query: Query, core: Scheduler | None, now: float, wall: float) -> Reply:
    if core is None:
        return _refusal(query, 503, "no worker is ready yet", "unavailable", None)
    body, following = block_page(core, query.cursor, now, wall)
    return Reply(query.number, 200, body, following)


def explain(query: Query, core: Scheduler | None) -> Reply:
    """What the prefix cache has of ``tokens`` under ``cache_salt`` and ``tenant``, and why not more."""
    if core is None:
        return _refusal(query, 503, "no worker is ready yet", "unavailable", None)
    tokens, salt, tenant = query.args.get("tokens"), query.args.get("cache_salt", ""), query.args.get("tenant", "")
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        return _refusal(query, 400, "tokens is not a list of token ids", "invalid_value", "tokens")
    if not isinstance(salt, str) or not isinstance(tenant, str):
        return _refusal(query, 400, "cache_salt and tenant are strings", "invalid_value", "cache_salt")
    if len(tokens) > core.limits.max_model_len or not all(0 <= token < core.limits.vocab_size for token in tokens):
        message = f"tokens are at most {core.limits.max_model_len} ids below {core.limits.vocab_size}"
        return _refusal(query, 400, message, "invalid_value", "tokens")
    if not core.limits.enable_prefix_caching:
        return _refusal(query, 400, "prefix caching is off (--no-enable-prefix-caching)", "unsupported_value", None)
    return Reply(query.number, 200, core.tables.cache.explain(core.limits.salt(salt, tenant), pack(tokens)))


def _refusal(query: Query, status: int, message: str, code: str, param: str | None) -> Reply:
    return Reply(query.number, status, {"message": message, "code": code, "param": param})


def unknown(query: Query) -> Reply:
    message = f"the scheduler cannot answer {query.what!r}; it can: metrics, status, ledger, explain"
    return _refusal(query, 404, message, "not_found", "what")
