"""A scheduler small enough to trust: makes plans by hand for prompts and collects what the executor samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.worker.executor import Executor
from shared.codec import int32
from shared.sampling import SamplingParams
from shared.wire import NewRow, Plan

GREEDY = SamplingParams(temperature=0.0)


def plan(**changes: Any) -> Plan:
    """A plan of nothing, changed by keyword; int32 columns may be lists."""
    values = {"step_id": 1, "scheduler_epoch": 1, "worker_epoch": 1, "full": False, "decodes": 0}
    columns = ("tokens", "table_blocks", "append_slots", "append_blocks", "swap_out", "swap_in", "copies")
    values |= {name: int32(value) if name in columns else value for name, value in changes.items()}
    return Plan(**values)


def two_prompts(prompts: Sequence[list[int]], rows: list[NewRow], **changes: Any) -> Plan:
    """A full plan of two prompts, each at most a block long, whole and sampling, in slots 0 and 1."""
    return plan(
        full=True,
        new_rows=rows,
        table_slots=[0, 1],
        table_lens=[1, 1],
        table_blocks=[4, 5],
        chunk_slots=[0, 1],
        chunk_starts=[0, 0],
        chunk_lens=[len(prompt) for prompt in prompts],
        chunk_samples=[[0], [1]],
        tokens=[id for prompt in prompts for id in prompt],
        **changes,
    )


def new_row(slot: int, params: SamplingParams = GREEDY, length: int = 0) -> NewRow:
    return NewRow(slot, 0, length, params.temperature, params.top_p, params.top_k, params.min_p, seed=params.seed)


@dataclass
class Running:
    slot: int
    prompt: list[int]
    wanted: int
    params: SamplingParams
    computed: int = 0
    blocks: int = 0
    output: list[int] = field(default_factory=list)


class Driver:
    """Runs prompts through an executor: free slots and blocks in shuffled order, prefill in chunks of given sizes.

    chunks(i) is the size of the i-th chunk handed out; several rows prefill in one step, beside those that decode.
    """

    def __init__(
        self, executor: Executor, *, chunks: Callable[[int], int] = lambda i: 1 << 20, budget: int = 512, seed: int = 0
    ) -> None:
        self.executor, self.chunks, self.budget = executor, chunks, budget
        memory = executor.memory
        self.block_size = memory.block_size
        self.free = list(range(1, memory.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.steps = self.handed_out = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        params: Sequence[SamplingParams] | None = None,
        *,
        at_once: int = 8,
    ) -> list[list[int]]:
        """``tokens`` output ids for each prompt, at most ``at_once`` of them in the batch together. No EOS check."""
        params = params or [GREEDY] * len(prompts)
        queue = [Running(-1, list(p), tokens, s) for p, s in zip(prompts, params, strict=True)]
        everything, running = list(queue), dict[int, Running]()
        slots = list(range(at_once))
        release: list[int] = []
        while queue or running:
            entering = []
            while queue and slots:
                sequence = queue.pop(0)
                sequence.slot = slots.pop(0)
                running[sequence.slot] = sequence
                entering.append(sequence)
            release = self._step(running, entering, release)
            slots = sorted(slots + release)
            for slot in release:
                running.pop(slot)
                self.free += self.tables.pop(slot)
        self.executor.execute(plan(step_id=self.steps + 1, release=release))
        self.steps += 1
        return [sequence.output for sequence in everything]

    def _step(self, running: dict[int, Running], entering: list[Running], release: list[int]) -> list[int]:
        """Executes one plan; returns the slots that are finished, to be released in the next."""
        decoding = [s for s in running.values() if s.computed >= len(s.prompt)]
        left = self.budget - len(decoding)
        chunks: list[tuple[Running, int]] = []
        for sequence in running.values():
            missing = len(sequence.prompt) - sequence.computed
            if missing > 0 and left > 0:
                count = min(missing, left, self.chunks(self.handed_out))
                self.handed_out += 1
                left -= count
                chunks.append((sequence, count))
        new = {s.slot for s in entering}
        for slot in new:
            self.tables[slot] = []
        appended: list[tuple[int, int]] = []
        for sequence, count in [*((s, 1) for s in decoding), *chunks]:
            table = self.tables[sequence.slot]
            while len(table) * self.block_size < sequence.computed + count:
                table.append(self.free.pop())
                if sequence.slot not in new:
                    appended.append((sequence.slot, table[-1]))
        self.steps += 1
        output = self.executor.execute(
            plan(
                step_id=self.steps,
                full=self.steps == 1,
                decodes=len(decoding),
                new_rows=[new_row(s.slot, s.params) for s in entering],
                chunk_slots=[s.slot for s, _ in chunks],
                chunk_starts=[s.computed for s, _ in chunks],
                chunk_lens=[n for _, n in chunks],
                chunk_samples=[[s.slot] if s.computed + n == len(s.prompt) else [] for s, n in chunks],
                table_slots=sorted(new),
                table_lens=[len(self.tables[slot]) for slot in sorted(new)],
                release=release,
                tokens=[t for s, n in chunks for t in s.prompt[s.computed : s.computed + n]],
                table_blocks=[b for slot in sorted(new) for b in self.tables[slot]],
                append_slots=[slot for slot, _ in appended],
                append_blocks=[block for _, block in appended],
            )
        )
        for sequence in decoding:
            sequence.computed += 1
        for sequence, count in chunks:
            sequence.computed += count
        finished = []
        for slot, token in zip(output.slots.tolist(), output.ids.tolist(), strict=True):
            running[slot].output.append(token)
            if len(running[slot].output) == running[slot].wanted:
                finished.append(slot)
        return finished
