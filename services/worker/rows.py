"""The persistent batch: what a worker keeps of every slot, and how a plan changes it.

A plan is first checked whole against a copy of the rows' small columns; only a plan that is right is applied, so a
PlanError leaves everything as it was. Columns are numpy arrays of ``max_num_seqs`` entries, indexed by slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from services.worker.executor import PlanError
from shared.codec import Int32
from shared.wire import NewRow, Plan, RowRules

Ints = npt.NDArray[np.int64]

_GREEDY_BELOW = 1e-5
"""A temperature so small that dividing by it could overflow means greedy."""


@dataclass
class State:
    """The columns a plan is checked against. blocks: entries of the slot's table. length: tokens with KV."""

    alive: npt.NDArray[np.bool_]
    decoding: npt.NDArray[np.bool_]
    paused: npt.NDArray[np.bool_]
    length: Ints
    blocks: Ints

    @classmethod
    def empty(cls, slots: int) -> State:
        alive, decoding, paused = np.zeros((3, slots), dtype=np.bool_)
        length, blocks = np.zeros((2, slots), dtype=np.int64)
        return cls(alive, decoding, paused, length, blocks)

    def copy(self) -> State:
        return State(*(getattr(self, f.name).copy() for f in fields(self)))

    def clear(self, slots: object = slice(None)) -> None:
        for f in fields(self):
            getattr(self, f.name)[slots] = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one plan computes: token i of the batch belongs to row ``token_slots[i]``, at ``positions[i]``.

    Decode rows come first, one token each, in ascending slot order; then the chunks. Sampled entry j takes the logits
    of token ``sample_tokens[j]`` and fills position ``sample_positions[j]`` of ``sample_slots[j]``. stored: whether a
    token's KV was in the row's blocks before this step, which are not written then: they may be others' too.
    """

    decode_slots: Ints
    chunk_slots: Ints
    chunk_lens: Ints
    chunk_ends: Ints
    token_slots: Ints
    positions: Ints
    stored: npt.NDArray[np.bool_]
    sample_tokens: Ints
    sample_slots: Ints
    sample_positions: Ints


@dataclass(frozen=True, slots=True)
class Limits:
    """What plans may name: slots, blocks (0 is padding), table entries, positions and token ids below these."""

    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    host_blocks: int = 0

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass
class Rows:
    limits: Limits
    state: State = field(init=False)
    tables: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        slots = self.limits.max_num_seqs
        self.state = State.empty(slots)
        self.tables = np.zeros((slots, self.limits.max_blocks), dtype=np.int32)
        self.temperature = np.zeros(slots, dtype=np.float32)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.seed = np.zeros(slots, dtype=np.int64)
        self.logprobs = np.full(slots, -1, dtype=np.int64)
        self.masked = np.zeros(slots, dtype=np.bool_)
        self.ranked = np.zeros(slots, dtype=np.bool_)

    def apply(self, plan: Plan) -> Step:
        """Checks ``plan`` and makes its changes, lengths after the step included. Raises PlanError, changing nothing.

        Swaps and copies are checked here and made by the caller, before the step's stores.
        """
        state = self.state.copy()
        if plan.full:
            state.clear()
        self._check_shape(plan)
        self._release(plan, state)
        self._enter(plan, state)
        appended_at = self._check_tables(plan, state)
        self._pause(plan, state)
        self._check_moves(plan)
        step = self._schedule(plan, state)
        self.state = state
        self._write_rows(plan)
        self._write_tables(plan, appended_at)
        return step

    def slot_mapping(self, step: Step) -> Ints:
        """Where each token of the step is stored; -1 for one that is there already."""
        block_size = self.limits.block_size
        blocks = self.tables[step.token_slots, step.positions // block_size].astype(np.int64)
        return np.where(step.stored, -1, blocks * block_size + step.positions % block_size)

    # ---- checks, in the order in which a plan is applied -----------------------------------------------------------

    def _check_shape(self, plan: Plan) -> None:
        chunks = len(plan.chunk_slots)
        if not chunks == len(plan.chunk_starts) == len(plan.chunk_lens) == len(plan.chunk_samples):
            raise PlanError("chunk_slots, chunk_starts, chunk_lens and chunk_samples differ in length")
        if sum(plan.chunk_lens) != len(plan.tokens):
            raise PlanError(f"chunk_lens add up to {sum(plan.chunk_lens)}, but there are {len(plan.tokens)} tokens")
        if len(plan.table_slots) != len(plan.table_lens) or sum(plan.table_lens) != len(plan.table_blocks):
            raise PlanError("table_slots, table_lens and table_blocks do not fit together")
        if len(plan.append_slots) != len(plan.append_blocks):
            raise PlanError("append_slots and append_blocks differ in length")
        if len(plan.tokens) and not (plan.tokens.min() >= 0 and plan.tokens.max() < self.limits.vocab_size):
            raise PlanError(f"a token id is outside 0..{self.limits.vocab_size - 1}")

    def _slot(self, slot: int, state: State, what: str) -> None:
        if not 0 <= slot < self.limits.max_num_seqs:
            raise PlanError(f"slot {slot}: {what} a slot outside 0..{self.limits.max_num_seqs - 1}")
        if not state.alive[slot]:
            raise PlanError(f"slot {slot}: {what} a slot that holds no row")

    def _release(self, plan: Plan, state: State) -> None:
        for slot in plan.release:
            self._slot(slot, state, "releases")
            state.clear(slot)

    def _enter(self, plan: Plan, state: State) -> None:
        with_table = set(plan.table_slots)
        for row in plan.new_rows:
            if not 0 <= row.slot < self.limits.max_num_seqs:
                raise PlanError(f"slot {row.slot}: a new row outside 0..{self.limits.max_num_seqs - 1}")
            if state.alive[row.slot]:
                raise PlanError(f"slot {row.slot}: a new row where one is already")
            if row.slot not in with_table:
                raise PlanError(f"slot {row.slot}: a new row without a block table")
            if not -1 <= row.logprobs <= self.limits.vocab_size:
                raise PlanError(f"slot {row.slot}: logprobs {row.logprobs} is outside -1..{self.limits.vocab_size}")
            if not 0 <= row.length < self.limits.max_model_len:
                raise PlanError(f"slot {row.slot}: length {row.length} is outside 0..{self.limits.max_model_len - 1}")
            _check_sampling(row)
            if row.rules is not None:
                _check_rules(row.slot, row.rules, self.limits.vocab_size)
            if row.run is not None:
                _check_run(row, self.limits.vocab_size)
            state.alive[row.slot] = True
            state.length[row.slot] = row.length

    def _check_tables(self, plan: Plan, state: State) -> Ints:
        """Returns where in its table each appended block goes."""
        for blocks in (plan.table_blocks, plan.append_blocks):
            if len(blocks) and not (blocks.min() > 0 and blocks.max() < self.limits.num_blocks):
                raise PlanError(f"a block of a table is outside 1..{self.limits.num_blocks - 1}")
        if len(set(plan.table_slots)) != len(plan.table_slots):
            raise PlanError("a slot has two tables")
        for slot, count in zip(plan.table_slots, plan.table_lens, strict=True):
            self._slot(slot, state, "a table for")
            if not 0 <= count <= self.limits.max_blocks:
                raise PlanError(f"slot {slot}: a table of {count} blocks is longer than {self.limits.max_blocks}")
            if count * self.limits.block_size < state.length[slot]:
                raise PlanError(f"slot {slot}: a table of {count} blocks does not hold its {state.length[slot]} tokens")
            state.blocks[slot] = count
        at = np.empty(len(plan.append_slots), dtype=np.int64)
        for i, slot in enumerate(plan.append_slots.tolist()):
            self._slot(slot, state, "appends to")
            at[i] = state.blocks[slot]
            if at[i] >= self.limits.max_blocks:
                raise PlanError(f"slot {slot}: its table is longer than {self.limits.max_blocks} blocks")
            state.blocks[slot] += 1
        return at

    def _pause(self, plan: Plan, state: State) -> None:
        for slot in plan.pause:
            self._slot(slot, state, "pauses")
            if state.paused[slot]:
                raise PlanError(f"slot {slot}: paused twice")
            state.paused[slot] = True
        for slot in plan.resume:
            self._slot(slot, state, "resumes")
            if not state.paused[slot]:
                raise PlanError(f"slot {slot}: resumed, but not paused")
            state.paused[slot] = False

    def _check_moves(self, plan: Plan) -> None:
        """Nothing is written twice, and nothing that is written is read, so the order within each column is free."""
        blocks, host = range(1, self.limits.num_blocks), range(self.limits.host_blocks)
        out_from, out_to = self._pairs("swap_out", plan.swap_out, blocks, host)
        in_from, in_to = self._pairs("swap_in", plan.swap_in, host, blocks)
        copied_from, copied_to = self._pairs("copies", plan.copies, blocks, blocks)
        for read, written in ((out_from | copied_from, [*in_to, *copied_to]), (in_from, out_to)):
            if len(set(written)) != len(written) or read & set(written):
                raise PlanError("a block is the destination of two moves, or source and destination in one plan")

    def _pairs(self, name: str, moves: Int32, sources: range, destinations: range) -> tuple[set[int], list[int]]:
        """The sources and the destinations of a column of moves, checked to lie in their memories."""
        if len(moves) % 2:
            raise PlanError(f"{name} are not pairs")
        for blocks, allowed in ((moves[::2], sources), (moves[1::2], destinations)):
            if len(blocks) and not (blocks.min() >= allowed.start and blocks.max() < allowed.stop):
                raise PlanError(f"{name} name a block outside {allowed.start}..{allowed.stop - 1}")
        return set(moves[::2].tolist()), moves[1::2].tolist()

    def _schedule(self, plan: Plan, state: State) -> Step:
        decode_slots = np.flatnonzero(state.decoding & ~state.paused)
        if len(decode_slots) != plan.decodes:
            raise PlanError(f"the plan counts {plan.decodes} decoding rows; there are {len(decode_slots)}")
        decode_positions = state.length[decode_slots]
        self._check_room(decode_slots, decode_positions + 1, state)

        chunk_slots = np.asarray(plan.chunk_slots, dtype=np.int64)
        chunk_lens = np.asarray(plan.chunk_lens, dtype=np.int64)
        starts = np.asarray(plan.chunk_starts, dtype=np.int64)
        if len(set(plan.chunk_slots)) != len(plan.chunk_slots):
            raise PlanError("a slot has two chunks")
        for slot, start, count in zip(plan.chunk_slots, plan.chunk_starts, plan.chunk_lens, strict=True):
            self._slot(slot, state, "a chunk for")
            if state.paused[slot] or state.decoding[slot]:
                raise PlanError(
                    f"slot {slot}: a chunk for a row that is {'paused' if state.paused[slot] else 'decoding'}"
                )
            if count < 1:
                raise PlanError(f"slot {slot}: a chunk of {count} tokens")
            if not 0 <= start <= state.length[slot]:
                raise PlanError(f"slot {slot}: a chunk from position {start}, but it holds {state.length[slot]} tokens")
        ends = starts + chunk_lens
        self._check_room(chunk_slots, ends, state)
        held = state.length[chunk_slots]
        state.length[decode_slots] += 1
        state.length[chunk_slots] = ends

        sampled = [slot for slots in plan.chunk_samples for slot in slots]
        counts = [len(slots) for slots in plan.chunk_samples]
        for slot in sampled:
            self._slot(slot, state, "samples into")
            if state.paused[slot] or state.decoding[slot]:
                raise PlanError(f"slot {slot}: sampled into while paused or decoding, or twice")
            state.decoding[slot] = True
        sampled_slots, sampled_ends = np.asarray(sampled, dtype=np.int64), np.repeat(ends, counts)
        self._check_room(sampled_slots, sampled_ends, state)
        state.length[sampled_slots] = sampled_ends

        decodes = len(decode_slots)
        never = np.zeros(decodes, dtype=np.bool_)
        chunk_ends_in_batch = decodes + np.cumsum(chunk_lens)
        offsets = np.arange(chunk_lens.sum()) - np.repeat(np.cumsum(chunk_lens) - chunk_lens, chunk_lens)
        chunk_positions = np.repeat(starts, chunk_lens) + offsets
        return Step(
            decode_slots=decode_slots,
            chunk_slots=chunk_slots,
            chunk_lens=chunk_lens,
            chunk_ends=ends,
            token_slots=np.concatenate([decode_slots, np.repeat(chunk_slots, chunk_lens)]),
            positions=np.concatenate([decode_positions, chunk_positions]),
            stored=np.concatenate([never, chunk_positions < np.repeat(held, chunk_lens)]),
            sample_tokens=np.concatenate([np.arange(decodes), np.repeat(chunk_ends_in_batch - 1, counts)]),
            sample_slots=np.concatenate([decode_slots, sampled_slots]),
            sample_positions=np.concatenate([decode_positions + 1, sampled_ends]),
        )

    def _check_room(self, slots: Ints, needed: Ints, state: State) -> None:
        """Each slot's table and the model's limit allow ``needed`` tokens."""
        short = state.blocks[slots] * self.limits.block_size < needed
        if short.any():
            slot, tokens = slots[short][0], needed[short][0]
            raise PlanError(f"slot {slot}: a table of {state.blocks[slot]} blocks is too short for {tokens} tokens")
        if (needed > self.limits.max_model_len).any():
            slot = slots[needed > self.limits.max_model_len][0]
            raise PlanError(f"slot {slot}: more than max_model_len {self.limits.max_model_len} tokens")

    # ---- writes ----------------------------------------------------------------------------------------------------

    def _write_rows(self, plan: Plan) -> None:
        for row in plan.new_rows:
            self.tables[row.slot] = 0
            self.temperature[row.slot] = row.temperature if row.temperature >= _GREEDY_BELOW else 0.0
            self.top_p[row.slot] = row.top_p
            self.top_k[row.slot] = row.top_k
            self.min_p[row.slot] = row.min_p
            self.seed[row.slot] = row.seed
            self.logprobs[row.slot] = row.logprobs
            self.masked[row.slot] = row.masked
            self.ranked[row.slot] = row.ranked

    def _write_tables(self, plan: Plan, appended_at: Ints) -> None:
        begin = 0
        for slot, count in zip(plan.table_slots, plan.table_lens, strict=True):
            self.tables[slot, :count] = plan.table_blocks[begin : begin + count]
            self.tables[slot, count:] = 0
            begin += count
        self.tables[plan.append_slots, appended_at] = plan.append_blocks


def _check_sampling(row: NewRow) -> None:
    in_range = {
        "temperature": 0 <= row.temperature < float("inf"),
        "top_p": 0 < row.top_p <= 1,
        "top_k": row.top_k >= 0,
        "min_p": 0 <= row.min_p <= 1,
        "seed": 0 <= row.seed < 1 << 63,
    }
    for name, fine in in_range.items():
        if not fine:
            raise PlanError(f"slot {row.slot}: {name} {getattr(row, name)} is out of range")


def _check_run(row: NewRow, vocab_size: int) -> None:
    run = row.run
    assert run is not None
    if row.logprobs < 0 or run.start < 1 or not run.tokens:
        raise PlanError(
            f"slot {row.slot}: a run of {len(run.tokens)} tokens from {run.start} on, logprobs {row.logprobs}"
        )
    if not 0 <= min(run.tokens) <= max(run.tokens) < vocab_size:
        raise PlanError(f"slot {row.slot}: its run names a token id outside 0..{vocab_size - 1}")


def _check_rules(slot: int, row: RowRules, vocab_size: int) -> None:
    rules = row.rules
    named = [*rules.logit_bias_ids, *rules.allowed_token_ids, *row.stop_ids, *row.tokens]
    named += [id for word in rules.bad_words for id in word]
    if named and not 0 <= min(named) <= max(named) < vocab_size:
        raise PlanError(f"slot {slot}: its rules name a token id outside 0..{vocab_size - 1}")
    if len(rules.logit_bias_ids) != len(rules.logit_bias) or not all(rules.bad_words):
        raise PlanError(f"slot {slot}: logit_bias has no value for each id, or a bad word no ids")
    if not -1 <= row.prompt_logprobs <= vocab_size or row.prompt_tokens < 1:
        raise PlanError(f"slot {slot}: prompt_logprobs {row.prompt_logprobs} of {row.prompt_tokens} tokens")
    if not (rules.repetition_penalty > 0 and 0 < rules.typical_p <= 1):
        raise PlanError(f"slot {slot}: repetition_penalty or typical_p is out of range")
