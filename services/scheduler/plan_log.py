"""One JSON line per plan: who was computed where, for tests, benchmarks and anyone who wonders."""

from __future__ import annotations

import json
from pathlib import Path

from services.scheduler.scheduler import Scheduler
from shared.errors import ConfigError
from shared.wire import Plan


class PlanLog:
    """Appends to ``path``. Sequences are written as ``rid/seq``.

    slots: every slot in this plan and whose it is. decodes: sequences that decode one token. chunks: [sequence, first
    position, tokens, whether the prompt is complete]. released: slots left by sequences that are over or preempted.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("a", buffering=1)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise ConfigError(f"--plan-log {path}: {error.strerror}") from error

    def write(self, plan: Plan, scheduler: Scheduler) -> None:
        step, rows = scheduler.steps[-1], scheduler.rows
        named = {slot: sequence for slot, sequence in enumerate(rows.sequences) if sequence is not None}
        # A beam has its row for one step only and has left it by now.
        named |= dict(zip(plan.chunk_slots, (chunk.sequence for chunk in step.chunks), strict=True))
        named |= dict(zip(step.slots.tolist(), step.sequences, strict=True))
        names = {slot: f"{sequence.request.rid}/{sequence.index}" for slot, sequence in sorted(named.items())}
        chunks = zip(plan.chunk_slots, plan.chunk_starts, plan.chunk_lens, plan.chunk_samples, strict=True)
        load = scheduler.load
        entry = {
            "step": plan.step_id,
            "time": step.sent,
            "full": plan.full,
            "slots": names,
            "decodes": [names[slot] for slot in step.slots[: plan.decodes].tolist()],
            "chunks": [[names[slot], start, count, bool(samples)] for slot, start, count, samples in chunks],
            "new": [names[row.slot] for row in plan.new_rows],
            "released": plan.release,
            "running": load.running,
            "waiting": load.waiting,
            "preempted": load.preempted,
            "blocks_used": load.blocks_used,
            "blocks_total": load.blocks_total,
        }
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()
