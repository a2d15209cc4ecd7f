"""Rules of single rows on their logits: allowed tokens, bad words, min_tokens, logit_bias, penalties and typical_p.

They apply in this order, which is vLLM's, before temperature and filters; typical_p (Meister et al., "Locally Typical
Sampling", TACL 2023) comes last and looks at the distribution that the temperature makes. What a row's rules need is
kept as short lists of (token, value), so a step costs what these lists hold, whatever the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.edits import LogitEdits, RowIds
from shared.wire import NewRow, Plan, RowRules

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Upload = Callable[[npt.NDArray[np.generic]], torch.Tensor]

BANNED = float("-inf")
_TYPICAL_ROWS = 32
"""Rows that are sorted at a time: a sort takes eight times the memory of their logits."""


class RuledRow:
    """A row's rules, and what of its tokens they depend on. counts[i]: how often ``seen[i]`` is in the output."""

    def __init__(self, row: RowRules) -> None:
        self.rules = row.rules
        self.prompt_tokens = row.prompt_tokens
        self.min_length = row.prompt_tokens + row.rules.min_tokens
        self.prompt_logprobs = row.prompt_logprobs
        self.logprob_ids = row.logprob_ids
        self.prompt = np.asarray(row.tokens[: row.prompt_tokens] if row.prompt_logprobs >= 0 else [], dtype=np.int64)
        self.stop_ids = np.asarray(row.stop_ids, dtype=np.int64)
        self.allowed = np.asarray(row.rules.allowed_token_ids, dtype=np.int64)
        self.bias_ids = np.asarray(row.rules.logit_bias_ids, dtype=np.int64)
        self.bias = np.asarray(row.rules.logit_bias, dtype=np.float32)
        self._longest_bad = max(map(len, row.rules.bad_words), default=0)
        self._output: list[int] = []  # the end of it that bad words can begin in
        self._place: dict[int, int] = {}
        self._size = 0
        self._seen, self._counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        if row.rules.has_penalties:
            self._count_all(row.tokens, row.prompt_tokens)
        if self._longest_bad > 1:
            self._output = row.tokens[row.prompt_tokens :][1 - self._longest_bad :]

    @property
    def seen(self) -> Ints:
        return self._seen[: self._size]

    @property
    def counts(self) -> Floats:
        return self._counts[: self._size]

    def append(self, token: int) -> None:
        """The row has one more output token."""
        if self._longest_bad > 1:
            self._output = [*self._output, token][1 - self._longest_bad :]
        if self.rules.has_penalties:
            place = self._place.get(token)
            if place is None:
                place = self._add(token)
            self._counts[place] += 1

    def banned(self, position: int) -> list[int]:
        """What cannot be the token at ``position``. A bad word gives way where nothing else would be allowed."""
        banned = self.stop_ids.tolist() if position < self.min_length else []
        words = [
            word[-1]
            for word in self.rules.bad_words
            if len(word) == 1 or (len(word) <= len(self._output) + 1 and self._output[1 - len(word) :] == word[:-1])
        ]
        if words and len(self.allowed) and set(self.allowed.tolist()) <= {*banned, *words}:
            return banned
        return banned + words

    def _count_all(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        everything = np.asarray(tokens, dtype=np.int64)
        self._seen = np.unique(everything)
        self._size = len(self._seen)
        self._counts = np.zeros(self._size, dtype=np.float32)
        np.add.at(self._counts, np.searchsorted(self._seen, everything[prompt_tokens:]), 1)
        self._place = {token: place for place, token in enumerate(self._seen.tolist())}

    def _add(self, token: int) -> int:
        place, self._size = self._size, self._size + 1
        if place == len(self._seen):
            self._seen = np.concatenate([self._seen, np.zeros(max(place, 16), dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(max(place, 16), dtype=np.float32)])
        self._seen[place], self._counts[place] = token, 0
        self._place[token] = place
        return place


class LogitRules:
    """The rules of a batch's rows, by slot; a batch without any pays nothing."""

    def __init__(self, upload: Upload) -> None:
        self._rows: dict[int, RuledRow] = {}
        self._upload = upload

    def change(self, plan: Plan) -> None:
        """Rows that leave and enter with ``plan``."""
        if plan.full:
            self._rows.clear()
        if self._rows:
            for slot in plan.release:
                self._rows.pop(slot, None)
        for row in plan.new_rows:
            self._enter(row)

    def _enter(self, row: NewRow) -> None:
        if row.rules is not None:
            self._rows[row.slot] = RuledRow(row.rules)

    def among(self, slots: Ints) -> list[tuple[int, RuledRow]]:
        """Places in ``slots`` of rows with rules."""
        if not self._rows:
            return []
        return [(i, self._rows[slot]) for i, slot in enumerate(slots.tolist()) if slot in self._rows]

    def append(self, slots: Ints, ids: Ints) -> None:
        """Each of these rows has sampled a token."""
        for i, row in self.among(slots):
            row.append(int(ids[i]))

    def apply(
        self, logits: torch.Tensor, rows: list[tuple[int, RuledRow]], positions: Ints, temperature: Floats
    ) -> torch.Tensor:
        """``logits [S, V]`` as float32 after the rules of ``rows``, a copy. positions: of the tokens to be sampled."""
        logits = logits.to(torch.float32, copy=True)
        self._allow(logits, [(i, row.allowed) for i, row in rows if len(row.allowed)])
        bans = [(i, np.asarray(row.banned(int(positions[i])), dtype=np.int64)) for i, row in rows]
        places, ids = self._pairs(bans)
        if len(ids):
            logits[places, ids] = BANNED
        biased = [(i, row) for i, row in rows if len(row.bias)]
        if biased:
            places, ids = self._pairs([(i, row.bias_ids) for i, row in biased])
            logits[places, ids] += self._upload(np.concatenate([row.bias for _, row in biased]))
        self._penalize(logits, [(i, row) for i, row in rows if row.rules.has_penalties and len(row.seen)])
        typical = [(i, row) for i, row in rows if row.rules.typical_p < 1 and temperature[i] > 0]
        for first in range(0, len(typical), _TYPICAL_ROWS):
            self._keep_typical(logits, typical[first : first + _TYPICAL_ROWS], temperature)
        return logits

    def edits(
        self, size: int, rows: list[tuple[int, RuledRow]], positions: Ints, temperature: Floats
    ) -> LogitEdits | None:
        """The rules of ``rows`` in a batch of ``size``; None if one is typical_p, which looks at a whole row."""
        if any(row.rules.typical_p < 1 and temperature[i] > 0 for i, row in rows):
            return None
        penalties = np.zeros((size, 3), dtype=np.float32)
        seen: list[tuple[int, Ints]] = []
        counts: list[Floats] = []
        for i, row in rows:
            if row.rules.has_penalties:
                rules = row.rules
                penalties[i] = rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
                seen.append((i, row.seen))
                counts.append(row.counts)
        banned = [(i, np.asarray(row.banned(int(positions[i])), dtype=np.int64)) for i, row in rows]
        return LogitEdits(
            allowed=self._row_ids(size, [(i, row.allowed) for i, row in rows]),
            banned=self._row_ids(size, banned),
            bias=self._row_ids(size, [(i, row.bias_ids) for i, row in rows], [row.bias for _, row in rows]),
            seen=self._row_ids(size, seen, counts),
            penalties=self._upload(penalties),
        )

    def _row_ids(self, size: int, ids: list[tuple[int, Ints]], values: list[Floats] | None = None) -> RowIds:
        bounds = np.zeros(size + 1, dtype=np.int64)
        for i, of_row in ids:
            bounds[i + 1] = len(of_row)
        nothing = np.empty(0, dtype=np.int64)
        joined = self._upload(np.concatenate([nothing, *(of_row for _, of_row in ids)]))
        with_values = None if values is None else self._upload(np.concatenate([np.empty(0, np.float32), *values]))
        return RowIds(self._upload(np.cumsum(bounds)), joined, with_values)

    def _pairs(self, ids: list[tuple[int, Ints]]) -> tuple[torch.Tensor, torch.Tensor]:
        places = np.repeat(np.asarray([i for i, _ in ids], dtype=np.int64), [len(one) for _, one in ids])
        return self._upload(places), self._upload(np.concatenate([one for _, one in ids]))

    def _allow(self, logits: torch.Tensor, allowed: list[tuple[int, Ints]]) -> None:
        if not allowed:
            return
        places, ids = self._pairs(allowed)
        kept = logits[places, ids]
        logits[self._upload(np.asarray([i for i, _ in allowed]))] = BANNED
        logits[places, ids] = kept

    def _penalize(self, logits: torch.Tensor, rows: list[tuple[int, RuledRow]]) -> None:
        if not rows:
            return
        places, ids = self._pairs([(i, row.seen) for i, row in rows])
        lengths = [len(row.seen) for _, row in rows]

        def each(values: list[float]) -> torch.Tensor:
            return self._upload(np.repeat(np.asarray(values, dtype=np.float32), lengths))

        counts = self._upload(np.concatenate([row.counts for _, row in rows]))
        repetition = each([row.rules.repetition_penalty for _, row in rows])
        values = logits[places, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= each([row.rules.frequency_penalty for _, row in rows]) * counts
        values -= each([row.rules.presence_penalty for _, row in rows]) * (counts > 0)
        logits[places, ids] = values

    def _keep_typical(self, logits: torch.Tensor, rows: list[tuple[int, RuledRow]], temperature: Floats) -> None:
        """Keeps the tokens whose surprise is nearest to the entropy, the fewest that hold typical_p."""
        places = np.asarray([i for i, _ in rows])
        chosen = self._upload(places)
        mass = self._upload(np.asarray([[row.rules.typical_p] for _, row in rows], dtype=np.float32))
        logprobs = torch.log_softmax(logits[chosen] / self._upload(temperature[places])[:, None], dim=-1)
        probabilities = logprobs.exp()
        entropy = -(probabilities * logprobs).nansum(-1, keepdim=True)
        order = (-logprobs - entropy).abs().argsort(dim=-1)
        ordered = probabilities.gather(1, order)
        dropped = ordered.cumsum(-1) - ordered >= mass
        dropped[:, 0] = False
        logits[chosen] = logits[chosen].masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), BANNED)
