"""Who loses its memory to others, and whether it is computed again or copied to the host and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from services.scheduler.request import Sequence

SMOOTHING = 0.2  # weight of the newest measurement in a moving average
REMEMBERED = 64  # decisions kept to be shown


@dataclass(eq=False, slots=True)
class Decision:
    """One preemption of a group. Predictions are seconds, None while there is nothing measured to predict from.

    tokens: whose KV was lost or moved, those in shared blocks once. A recompute is predicted without the share of them
    that the prefix cache usually still has when a group comes back. wanted: the mode chosen before looking whether
    ``blocks`` fit into the ``host_free`` ones; mode: what was done. measured: the seconds spent on it so far.
    """

    step_id: int
    request_id: str
    sequences: int
    tokens: int
    blocks: int
    host_free: int
    wanted: str
    mode: str
    predicted_recompute: float | None
    predicted_swap: float | None
    measured: float = 0.0


class Costs:
    """What computing a token and moving a block take, from the steps that did it."""

    def __init__(self) -> None:
        self.token: float | None = None  # seconds per prompt token
        self.out: float | None = None  # seconds per block to the host
        self.back: float | None = None
        self.kept: float | None = None  # share of a recomputed sequence's tokens that the prefix cache still had

    def came_back(self, tokens: int, cached: int) -> None:
        """A sequence that lost its memory comes back: of its ``tokens``, ``cached`` need not be computed."""
        self.kept = _average(self.kept, cached / tokens)

    def observe(self, timings: Mapping[str, float], amounts: Mapping[str, int], *, prompt_tokens: int) -> None:
        """A step's timings, and what each part of them was spent on: tokens (some in chunks) or blocks swapped."""
        tokens, out, back = (amounts.get(part, 0) for part in ("forward", "swap_out", "swap_in"))
        if 2 * prompt_tokens >= tokens > 0 and "forward" in timings:  # decodes cost differently
            self.token = _average(self.token, timings["forward"] / tokens)
        if out and "swap_out" in timings:
            self.out = _average(self.out, timings["swap_out"] / out)
        if back and "swap_in" in timings:
            self.back = _average(self.back, timings["swap_in"] / back)

    def recompute(self, tokens: int) -> float | None:
        return None if self.token is None else self.token * tokens * (1 - (self.kept or 0.0))

    def swap(self, blocks: int) -> float | None:
        """There and back. Until something came back, that is expected to take as long as going out."""
        if self.out is None:
            return None
        return blocks * (self.out + (self.out if self.back is None else self.back))


class Preemption:
    """``mode`` is that of ``--preemption-mode``; swapping also needs room on the host, or it is computed again."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.costs = Costs()
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self.counts = {"recompute": 0, "swap": 0}

    def victims(self, running: Collection[Sequence]) -> list[Sequence]:
        """All running sequences of the group to preempt: the lowest priority, least often preempted, newest.

        The oldest of the top priority keeps its memory. When nobody else runs, its own last sequence makes room.
        """
        oldest = min(running, key=lambda sequence: (sequence.request.priority, sequence.request.order)).request
        others = [sequence for sequence in running if sequence.request is not oldest]
        if not others:
            return [max(running, key=lambda sequence: sequence.index)]
        victim = max(others, key=lambda sequence: sequence.victim_key).request
        return sorted((one for one in others if one.request is victim), key=lambda one: one.index)

    def decide(self, group: list[Sequence], block_size: int, step_id: int, host_free: int) -> Decision:
        """How ``group``, whose ``cached`` tokens have KV in its blocks, makes room. Shared blocks count once."""
        held: dict[int, int] = {}  # block → tokens in it
        for sequence in group:
            for index, block in enumerate(sequence.blocks):
                held[block] = max(held.get(block, 0), min(block_size, sequence.cached - index * block_size))
        stored, blocks = sum(held.values()), len(held)
        recompute, swap = self.costs.recompute(stored), self.costs.swap(blocks)
        wanted = self.mode
        if wanted == "auto":  # what was never measured is tried
            wanted = "recompute" if recompute is None or (swap is not None and recompute <= swap) else "swap"
        mode = wanted if 0 < blocks <= host_free else "recompute"
        request = group[0].request
        decision = Decision(
            step_id=step_id,
            request_id=request.request_id,
            sequences=len(group),
            tokens=stored,
            blocks=blocks,
            host_free=host_free,
            wanted=wanted,
            mode=mode,
            predicted_recompute=recompute,
            predicted_swap=swap,
        )
        self.decisions.append(decision)
        self.counts[mode] += 1
        for sequence in group:
            sequence.preempted_by = decision
        return decision

    def status(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "counts": dict(self.counts),
            "seconds_per_token": self.costs.token,
            "share_still_cached": self.costs.kept,
            "seconds_per_block_out": self.costs.out,
            "seconds_per_block_in": self.costs.back,
            "recent": [asdict(decision) for decision in self.decisions],
        }


def _average(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
