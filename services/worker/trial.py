"""The largest steps that plans can ask for, run before serving to see what memory they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kernels.ops import Kernels
from services.worker.device import Device
from services.worker.executor import no_mask
from services.worker.host_memory import HostMemory
from services.worker.logprobs import RAW_LOGPROBS, LogprobsMode
from services.worker.models.decoder import Decoder
from services.worker.rows import Limits
from services.worker.runner import Runner
from shared.codec import int32
from shared.sampling import LogitRules
from shared.wire import NewRow, Plan, RowRules

BLOCKS = 2
"""The padding, and one block that every table names for all its entries: what attention reads does not matter."""
_LOGPROBS = 20  # as many as OpenAI's API allows
_RULES = LogitRules(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, typical_p=0.9)


@dataclass(frozen=True)
class Trial:
    """tokens: of the largest batch. allocate: KV memory of so many blocks, a tensor a layer. told: which logprobs."""

    device: Device
    kernels: Kernels
    decoder: Decoder
    limits: Limits
    tokens: int
    allocate: Callable[[int], list[torch.Tensor]]
    told: LogprobsMode = RAW_LOGPROBS

    def run(self) -> None:
        """Runs them as plans like any other, on KV memory that is gone afterwards."""
        kv, limits = self.allocate(BLOCKS), replace(self.limits, num_blocks=BLOCKS, host_blocks=0)
        host = HostMemory(self.device, kv, 0)
        runner = Runner(self.device, self.kernels, self.decoder, limits, kv, host, self.told)
        for plan in largest_plans(limits, self.tokens):
            step = runner.launch(plan, no_mask)
            step.wait()
            step.output()


def largest_plans(limits: Limits, tokens: int) -> Iterator[Plan]:
    """A batch of ``tokens`` in which every row samples, under every rule and with logprobs, of its prompt too; then all
    rows decode but one that enters with the rest of the tokens. Tables are as long as they get."""
    rows = min(limits.max_num_seqs, tokens)
    longest = max(1, limits.max_model_len - 1)  # leaves room for a token to decode
    lens, left = [], tokens
    for i in range(rows):
        lens.append(min(longest, left - (rows - i - 1)))
        left -= lens[-1]
    yield _plan(limits, list(enumerate(lens)), step_id=1, full=True)
    if rows > 1 and limits.max_model_len > 1:
        rest = [(0, min(longest, tokens - (rows - 1)))]
        yield _plan(limits, rest, step_id=2, decodes=rows - 1, release=(0,))


def _plan(
    limits: Limits,
    rows: list[tuple[int, int]],
    *,
    step_id: int,
    full: bool = False,
    decodes: int = 0,
    release: tuple[int, ...] = (),
) -> Plan:
    """New rows (slot, tokens), each a chunk that samples."""
    slots, lens = [slot for slot, _ in rows], [count for _, count in rows]
    return Plan(
        step_id=step_id,
        scheduler_epoch=0,
        worker_epoch=0,
        full=full,
        decodes=decodes,
        new_rows=[_row(slot, count, min(_LOGPROBS, limits.vocab_size)) for slot, count in rows],
        chunk_slots=slots,
        chunk_starts=[0] * len(slots),
        chunk_lens=lens,
        chunk_samples=[[slot] for slot in slots],
        table_slots=slots,
        table_lens=[limits.max_blocks] * len(slots),
        release=list(release),
        tokens=int32([0] * sum(lens)),
        table_blocks=int32([BLOCKS - 1] * limits.max_blocks * len(slots)),
    )


def _row(slot: int, tokens: int, logprobs: int) -> NewRow:
    rules = RowRules(tokens, [0] * tokens, [], _RULES, prompt_logprobs=logprobs)
    return NewRow(
        slot, 0, 0, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, seed=slot, logprobs=logprobs, rules=rules
    )
