"""From logits to the tokens of a step, and the logprobs of those rows that want them.

What a step samples is fetched from the device without waiting for it: ``take`` gives it once the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from kernels.edits import LogitEdits
from kernels.ops import Kernels
from kernels.reference.sampling import filtered
from services.worker.device import Device, Mark
from services.worker.executor import MaskSource
from services.worker.logit_rules import BANNED, LogitRules, RuledRow
from services.worker.logprobs import RAW_LOGPROBS, FetchedLogprobs, LogprobsMode
from services.worker.masks import Masks
from services.worker.rows import Ints, Rows, Step
from shared.wire import Logprobs, Plan, Run

Logits = Callable[[torch.Tensor], torch.Tensor]
Told = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # what is told of logits [T, V], and of which ids
PROMPT_ROWS = 256
"""Prompt tokens whose logits are held at a time: those of a long prompt would be larger than the model."""


class Sampled:
    """What a step has sampled: ``on_device`` [S] int64, and on its way to the host.

    empty: rows that may have had nothing to sample, and whether they had, on its way as well.
    """

    def __init__(
        self,
        on_device: torch.Tensor,
        ids: torch.Tensor,
        mark: Mark,
        ruled: Sequence[tuple[int, RuledRow]],
        logprobs: FetchedLogprobs | None,
        empty: tuple[Ints, torch.Tensor] | None,
    ) -> None:
        self.on_device = on_device
        self._ids, self._mark, self._ruled, self._logprobs, self._empty = ids, mark, ruled, logprobs, empty

    def tell_rules(self) -> None:
        """Waits for the ids and gives them to the rows with rules, once."""
        if self._ruled:
            self._mark.wait()
            for place, row in self._ruled:
                row.append(int(self._ids[place]))
            self._ruled = ()

    def take(self) -> tuple[Ints, Logprobs | None]:
        self.tell_rules()
        self._mark.wait()
        ids: Ints = self._ids.numpy()
        if self._empty is not None:
            rows, are_empty = self._empty
            ids = ids.copy()  # on a CPU they are what the next step reads
            ids[rows[are_empty.numpy()]] = -1
        return ids, self._logprobs.take() if self._logprobs else None


class Sampler:
    """told: which logprobs rows get that ask for them."""

    def __init__(self, rows: Rows, kernels: Kernels, device: Device, told: LogprobsMode = RAW_LOGPROBS) -> None:
        self._rows, self._kernels, self._device, self._told = rows, kernels, device, told
        self._rules = LogitRules(device.upload)
        self._masks = Masks(device.upload)
        self._runs: dict[int, Run] = {}  # by slot, of rows with one
        self._before: Sampled | None = None  # of the newest step with ruled rows

    def change(self, plan: Plan) -> None:
        """Rows that leave and enter with ``plan``."""
        self._rules.change(plan)
        if plan.full:
            self._runs.clear()
        for slot in plan.release if self._runs else ():
            self._runs.pop(slot, None)
        self._runs |= {row.slot: row.run for row in plan.new_rows if row.run is not None}

    def takes_likeliest(self, step: Step) -> bool:
        """Whether each of the step's sampled entries gets its likeliest token, so that logits need no look."""
        rows, slots = self._rows, step.sample_slots
        return not rows.temperature[slots].any() and not rows.masked[slots].any() and not self._rules.among(slots)

    def sample(
        self, logits: torch.Tensor, step: Step, mask: MaskSource, likeliest: torch.Tensor | None = None
    ) -> Sampled:
        """One id for each row of ``logits [S, V]``, the step's sampled entries; logprobs of those that asked.

        likeliest: their ids, where that is what each gets. ``logits`` may be changed. An id is -1 where mask and rules
        together leave nothing. Rules look at the tokens before, so this waits for what the step before has sampled,
        which is there before this step's forward pass begins.
        """
        rows, slots, upload = self._rows, step.sample_slots, self._device.upload
        ruled = self._rules.among(slots)
        asked = np.flatnonzero(rows.logprobs[slots] >= 0)
        chosen, held, empty, edits = logits, np.empty(0, dtype=np.int64), None, None
        if rows.masked[slots].any() and (found := mask()) is not None:
            chosen = logits.clone() if len(asked) else logits
            held = self._masks.apply(chosen, found, slots, rows.masked)
        if ruled:
            if self._before is not None:
                self._before.tell_rules()
            both = np.intersect1d(held, [place for place, _ in ruled])
            positions, temperature = step.sample_positions, rows.temperature[slots]
            if self._kernels.edits_logits and not len(both):
                edits = self._rules.edits(len(slots), ruled, positions, temperature)
            if edits is None:
                chosen = self._rules.apply(chosen, ruled, positions, temperature)
            if len(both):
                empty = both, self._device.fetch(self._masks.fill_empty(chosen, both))
        ids = likeliest if likeliest is not None else self._drawn(chosen, step, edits)
        logprobs = None
        if len(asked):
            named = {i: row.logprob_ids for i, row in ruled if row.logprob_ids}
            values = self._values(logits, chosen, step, asked, ids, ruled if edits is not None else [])
            logprobs = self._logprobs(values, ids[upload(asked)], asked, rows.logprobs[slots[asked]], named)
        fetched = self._device.fetch(ids)
        sampled = Sampled(ids, fetched, self._device.mark(), ruled, logprobs, empty)
        if ruled:
            self._before = sampled
        return sampled

    def _drawn(self, logits: torch.Tensor, step: Step, edits: LogitEdits | None) -> torch.Tensor:
        rows, slots, upload = self._rows, step.sample_slots, self._device.upload
        return self._kernels.sample(
            logits,
            upload(rows.temperature[slots]),
            upload(rows.top_k[slots]),
            upload(rows.top_p[slots]),
            upload(rows.min_p[slots]),
            upload(rows.seed[slots]),
            upload(step.sample_positions),
            edits,
        )

    def _values(
        self,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        step: Step,
        asked: Ints,
        ids: torch.Tensor,
        edited: list[tuple[int, RuledRow]],
    ) -> torch.Tensor:
        """What the entries ``asked`` are told, [A, V]. chosen: logits after mask and rules, but for those ``edited``.

        What ranks the answers of a request is the model's own, whatever else is told.
        """
        upload, told = self._device.upload, self._told
        if told.processed:
            values = told.values(self._drawn_from(chosen, step, asked, ids, edited))
        else:
            values = told.values(logits[upload(asked)])
        ranked = np.flatnonzero(self._rows.ranked[step.sample_slots[asked]])
        if len(ranked) and told != RAW_LOGPROBS:
            values[upload(ranked)] = RAW_LOGPROBS.values(logits[upload(asked[ranked])])
        return values

    def _drawn_from(
        self, chosen: torch.Tensor, step: Step, asked: Ints, ids: torch.Tensor, edited: list[tuple[int, RuledRow]]
    ) -> torch.Tensor:
        """Logits after everything that ``asked`` entries were sampled under, -inf where that leaves nothing, [A, V].

        A greedy entry has no temperature and no filters. Kernels may sum in another order than this does: what was
        sampled was not filtered out.
        """
        rows, slots, upload = self._rows, step.sample_slots[asked], self._device.upload
        logits = chosen[upload(asked)]
        places = {entry: place for place, entry in enumerate(asked.tolist())}
        if ruled := [(places[entry], row) for entry, row in edited if entry in places]:
            logits = self._rules.apply(logits, ruled, step.sample_positions[asked], rows.temperature[slots])
        return filtered(
            logits,
            upload(rows.temperature[slots]),
            upload(rows.top_k[slots]),
            upload(rows.top_p[slots]),
            upload(rows.min_p[slots]),
            keep=ids[upload(asked)],
        )

    def tells_of_given(self, step: Step) -> bool:
        """Whether there is anything in ``given_logprobs``."""
        runs = bool(self._runs) and not self._runs.keys().isdisjoint(step.chunk_slots.tolist())
        return runs or any(row.prompt_logprobs >= 0 for _, row in self._rules.among(step.chunk_slots))

    def given_logprobs(self, hidden: torch.Tensor, logits: Logits, step: Step) -> list[FetchedLogprobs]:
        """Of the tokens of prompts and runs that the step's chunks compute the logits of, in rows that asked.

        hidden: [T, ...].
        """
        found: list[FetchedLogprobs] = []
        ruled = dict(self._rules.among(step.chunk_slots))
        firsts = len(step.decode_slots) + np.cumsum(step.chunk_lens) - step.chunk_lens

        def tell(place: int, start: int, targets: Ints, count: int, named: list[int], told: Told) -> None:
            """``targets``: the tokens from position ``start`` on."""
            first = int(firsts[place]) + start - 1 - int(step.chunk_ends[place] - step.chunk_lens[place])
            for at in range(0, len(targets), PROMPT_ROWS):
                ids = self._device.upload(targets[at : at + PROMPT_ROWS])
                entries, counts = np.full(len(ids), place), np.full(len(ids), count)
                values = told(logits(hidden[first + at : first + at + len(ids)]), ids)
                found.append(self._logprobs(values, ids, entries, counts, {place: named} if named else {}))

        for place, slot in enumerate(step.chunk_slots.tolist()):
            row, run, end = ruled.get(place), self._runs.get(slot), int(step.chunk_ends[place])
            start = end - int(step.chunk_lens[place]) + 1
            if row is not None and row.prompt_logprobs >= 0:
                tell(
                    place,
                    start,
                    row.prompt[start : end + 1],
                    row.prompt_logprobs,
                    [],
                    lambda part, _: self._told.values(part),
                )
            if run is not None:
                start = max(start, run.start)
                tokens = np.asarray(run.tokens[start - run.start : max(end + 1 - run.start, 0)], dtype=np.int64)
                named = row.logprob_ids if row is not None else []
                tell(place, start, tokens, int(self._rows.logprobs[slot]), named, partial(self._of_run, slot))
        return found

    def _of_run(self, slot: int, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """What is told of a run's tokens, [T, V]; processed, each is all that its mask would have left."""
        if self._rows.ranked[slot]:
            return RAW_LOGPROBS.values(logits)
        if self._told.processed:
            own = logits.float().gather(1, ids[:, None]) / (float(self._rows.temperature[slot]) or 1.0)
            logits = torch.full_like(logits, BANNED, dtype=torch.float32).scatter_(1, ids[:, None], own)
        return self._told.values(logits)

    def _logprobs(
        self, everything: torch.Tensor, ids: torch.Tensor, entries: Ints, counts: Ints, named: Mapping[int, list[int]]
    ) -> FetchedLogprobs:
        """Of token ``ids[i]`` in row i of ``everything [A, V]``, and the ``counts[i]`` that have most.

        named: by entry, what is told of in place of the likeliest.
        """
        sampled = everything.gather(1, ids.unsqueeze(1))
        top, top_ids = everything.topk(int(counts.max()), dim=-1)
        for row, entry in enumerate(entries.tolist() if named else ()):
            if entry in named:
                top_ids[row, : counts[row]] = self._device.upload(np.asarray(named[entry], dtype=np.int64))
                top[row] = everything[row, top_ids[row]]
        fetch = self._device.fetch
        return FetchedLogprobs(
            entries=entries,
            counts=counts,
            sampled=fetch(sampled.squeeze(1)),
            ranks=fetch((everything > sampled).sum(-1) + 1),
            top_ids=fetch(top_ids),
            top=fetch(top),
        )
