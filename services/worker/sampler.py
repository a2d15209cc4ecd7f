"""From logits to the tokens of a step, and the logprobs of those rows that want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

import numpy as np
import torch

from kernels.ops import Kernels
from services.worker.logit_rules import LogitRules, Upload
from services.worker.rows import Ints, Rows, Step
from shared.wire import Logprobs, Plan

Logits = Callable[[torch.Tensor], torch.Tensor]
PROMPT_ROWS = 256
"""Prompt tokens whose logits are held at a time: those of a long prompt would be larger than the model."""


class Sampler:
    def __init__(self, rows: Rows, kernels: Kernels, upload: Upload) -> None:
        self._rows, self._kernels, self._upload = rows, kernels, upload
        self._rules = LogitRules(upload)

    def change(self, plan: Plan) -> None:
        """Rows that leave and enter with ``plan``."""
        self._rules.change(plan)

    def sample(self, logits: torch.Tensor, step: Step) -> tuple[Ints, Logprobs | None]:
        """One id for each row of ``logits [S, V]``, the step's sampled entries; logprobs of those that asked.

        Rows without rules pay nothing for those of others but a copy of their logits.
        """
        if not len(step.sample_slots):
            return np.empty(0, dtype=np.int64), None
        rows, slots = self._rows, step.sample_slots
        ruled = self._rules.among(slots)
        chosen = logits
        if ruled:
            chosen = self._rules.apply(logits, ruled, step.sample_positions, rows.temperature[slots])
        ids = self._kernels.sample(
            chosen,
            self._upload(rows.temperature[slots]),
            self._upload(rows.top_k[slots]),
            self._upload(rows.top_p[slots]),
            self._upload(rows.min_p[slots]),
            self._upload(rows.seed[slots]),
            self._upload(step.sample_positions),
        )
        sampled: Ints = ids.cpu().numpy()
        if ruled:
            self._rules.append(slots, sampled)
        asked = np.flatnonzero(rows.logprobs[slots] >= 0)
        if not len(asked):
            return sampled, None
        places = self._upload(asked)
        named = {i: row.logprob_ids for i, row in ruled if row.logprob_ids}
        return sampled, self._logprobs(logits[places], ids[places], asked, rows.logprobs[slots[asked]], named)

    def tells_of_prompts(self, step: Step) -> bool:
        return any(row.prompt_logprobs >= 0 for _, row in self._rules.among(step.chunk_slots))

    def prompt_logprobs(self, hidden: torch.Tensor, logits: Logits, step: Step) -> Logprobs | None:
        """Of the prompt tokens that the step's chunks compute the logits of, in rows that asked. hidden: [T, ...]."""
        found = Logprobs([], [], [], [], [], [])
        firsts = len(step.decode_slots) + np.cumsum(step.chunk_lens) - step.chunk_lens
        for place, row in self._rules.among(step.chunk_slots):
            if row.prompt_logprobs < 0:
                continue
            first, end = int(firsts[place]), int(step.chunk_ends[place])
            targets = row.prompt[end - int(step.chunk_lens[place]) + 1 : end + 1]
            for at in range(0, len(targets), PROMPT_ROWS):
                ids = self._upload(targets[at : at + PROMPT_ROWS])
                entries, counts = np.full(len(ids), place), np.full(len(ids), row.prompt_logprobs)
                part = logits(hidden[first + at : first + at + len(ids)])
                _extend(found, self._logprobs(part, ids, entries, counts, {}))
        return found if found.entries else None

    def _logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor, entries: Ints, counts: Ints, named: Mapping[int, list[int]]
    ) -> Logprobs:
        """Of token ``ids[i]`` in row i of ``logits``, and the likeliest ``counts[i]``, of the model itself.

        named: by entry, what is told of in place of the likeliest.
        """
        everything = torch.log_softmax(logits.float(), dim=-1)
        sampled = everything.gather(1, ids.unsqueeze(1))
        values, tokens = everything.topk(int(counts.max()), dim=-1)
        for row, entry in enumerate(entries.tolist() if named else ()):
            if entry in named:
                tokens[row, : counts[row]] = self._upload(np.asarray(named[entry], dtype=np.int64))
                values[row] = everything[row, tokens[row]]
        wanted = torch.arange(values.shape[1]) < torch.from_numpy(counts).unsqueeze(1)
        return Logprobs(
            entries=entries.tolist(),
            sampled=sampled.squeeze(1).tolist(),
            top_counts=counts.tolist(),
            top_ids=tokens.cpu()[wanted].tolist(),
            top=values.cpu()[wanted].tolist(),
            ranks=((everything > sampled).sum(-1) + 1).tolist(),
        )


def _extend(all_: Logprobs, more: Logprobs) -> None:
    for column in fields(Logprobs):
        getattr(all_, column.name).extend(getattr(more, column.name))
