"""The null worker's executor: a toy deterministic model on simulated memory, which checks the scheduler.

``Rows`` checks each plan, as for a real model. The KV of a token is (token, position, hash of the whole prefix up to
it), kept per physical slot. The next token is a function of that hash, so any wrong read changes the output; and each
row checks on every step that the memory it reads is its own prefix.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.config import WorkerConfig
from services.worker.executor import Finished, MaskSource, PlanError, StepOutput, no_mask
from services.worker.generation import GenerationConfig
from services.worker.rows import Limits, Rows
from shared.codec import Int32
from shared.models import builtin, locate
from shared.sampling import SamplingDefaults
from shared.wire import Logprobs, Mask, Memory, Plan, RowRules, Run

DEFAULT_BLOCKS = 4096
DEFAULT_MODEL_LEN = 2048
DEFAULT_VOCAB = 49_152  # these two as the built-in model has them, so that its tokenizer fits without loading it
DEFAULT_EOS = (2,)
TIRED_ABOVE = 1.0  # with a temperature above this, one token in sixteen is an EOS
SWAP_SECONDS = 1e-5  # what swapping a block is said to take
BASE = 0x9E3779B97F4A7C15  # odd, so that its powers modulo 2**64 never vanish
BYTES_PER_TOKEN = 16  # of simulated KV, for what is measured in bytes
POISON = -1  # position stored in memory that nobody may read

Array64 = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]


class NullExecutor:
    """Executes plans on simulated memory. Raises PlanError for a plan that contradicts its rows or its memory.

    Greedy rows (temperature 0) depend on their prefix alone, others on the seed as well; up to a temperature of 1 no
    EOS is ever sampled, above it one token in sixteen is. Rules (penalties and the like) change nothing. A mask leaves
    some tokens, EOS ids perhaps among them, and one of these is sampled. verify: every row re-reads its whole prefix in
    every step, and what a block held before it came into a table is poisoned; otherwise it reads its newest token's
    memory, whose hash covers the rest, which is fast enough to measure the pipeline with.
    """

    def __init__(
        self,
        *,
        num_blocks: int = DEFAULT_BLOCKS,
        host_blocks: int = 0,
        block_size: int = 16,
        max_model_len: int = DEFAULT_MODEL_LEN,
        max_num_seqs: int = 256,
        vocab_size: int = DEFAULT_VOCAB,
        eos_ids: Sequence[int] = DEFAULT_EOS,
        model_digest: str = "",
        model_name: str = "null",
        defaults: SamplingDefaults | None = None,
        step_seconds: float = 0.0,
        verify: bool = False,
    ) -> None:
        self.memory = Memory(
            num_blocks=num_blocks,
            host_blocks=host_blocks,
            block_size=block_size,
            bytes_per_block=block_size * BYTES_PER_TOKEN,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_ids=list(eos_ids),
            model_digest=model_digest,
            model_name=model_name,
            defaults=defaults or SamplingDefaults(),
        )
        self._verify = verify
        self._step_seconds = step_seconds
        self._allowed = np.setdiff1d(np.arange(vocab_size), np.asarray(eos_ids))
        self._eos = int(eos_ids[0]) if eos_ids else int(self._allowed[0])
        powers = np.full(max_model_len + 1, BASE, dtype=np.uint64)
        powers[0] = 1
        self._powers = np.cumprod(powers, dtype=np.uint64)
        # Physical memory, by slot (block * block_size + place in it).
        self._token = np.zeros(num_blocks * block_size, dtype=np.int64)
        self._position = np.full(num_blocks * block_size, POISON, dtype=np.int64)
        self._hash = np.zeros(num_blocks * block_size, dtype=np.uint64)
        # The host's memory, by block.
        self._host = [np.zeros((host_blocks, block_size), dtype=one.dtype) for one in self._physical_memory]
        self._rows = Rows(Limits(max_num_seqs, num_blocks, block_size, max_model_len, vocab_size, host_blocks))
        self._prefix_hash = np.zeros(max_num_seqs, dtype=np.uint64)
        self._last = np.zeros(max_num_seqs, dtype=np.int64)
        self._rules: list[RowRules | None] = [None] * max_num_seqs
        self._runs: list[Run | None] = [None] * max_num_seqs
        self._prompt_logprobs = Logprobs([], [], [], [], [], [])

    @classmethod
    def from_config(cls, config: WorkerConfig) -> NullExecutor:
        """Vocabulary, EOS ids, digest and name are the MODEL's; without one, the built-in's, which is not fetched."""
        vocab_size, eos_ids = DEFAULT_VOCAB, list(DEFAULT_EOS)
        digest, name = builtin.SHA256, builtin.NAME
        folder = None
        if config.model:
            files = locate(config.model, download_dir=config.download_dir)
            folder = files.folder
            vocab_size, eos_ids = _vocabulary(folder)
            digest, name = files.digest, files.name
        generation = GenerationConfig.load(folder, config.generation_config, config.override_generation_config)
        num_blocks = config.num_gpu_blocks_override or DEFAULT_BLOCKS
        return cls(
            num_blocks=num_blocks,
            host_blocks=min(config.swap_space // (config.block_size * BYTES_PER_TOKEN), num_blocks - 1),
            block_size=config.block_size,
            max_model_len=config.max_model_len or DEFAULT_MODEL_LEN,
            max_num_seqs=config.max_num_seqs,
            vocab_size=vocab_size,
            eos_ids=generation.eos_ids or eos_ids,
            model_digest=digest,
            model_name=name,
            defaults=generation.defaults,
            step_seconds=config.null_step_ms / 1000,
        )

    def begin(self) -> None:
        pass

    def launch(self, plan: Plan, mask: MaskSource = no_mask) -> Finished:
        return Finished(self.execute(plan, mask))

    def execute(self, plan: Plan, mask: MaskSource = no_mask) -> StepOutput:
        started = time.perf_counter()
        rows = self._rows
        held = rows.state.length.copy()  # tokens with KV before this step
        step = rows.apply(plan)
        held[[row.slot for row in plan.new_rows]] = [row.length for row in plan.new_rows]
        self._move(plan, held)
        for row in plan.new_rows:
            self._rules[row.slot], self._runs[row.slot] = row.rules, row.run
            newest = self._physical(row.slot, row.length - 1) if row.length else None
            self._prefix_hash[row.slot] = 0 if newest is None else self._hash[newest]
        self._decode(step.decode_slots, step.positions[: len(step.decode_slots)])
        self._prompt_logprobs = Logprobs([], [], [], [], [], [])
        self._run_chunks(plan, held)
        order = step.sample_slots
        ids = self._sample(order)
        if rows.masked[order].any() and (found := mask()) is not None:
            self._sample_masked(order, ids, found)
        self._last[order] = ids
        if self._step_seconds:
            time.sleep(max(0.0, self._step_seconds - (time.perf_counter() - started)))
        total = time.perf_counter() - started
        timings = {"forward": total, "total": total}
        if len(plan.swap_out):
            timings["swap_out"] = SWAP_SECONDS * len(plan.swap_out) / 2
        if len(plan.swap_in):
            timings["swap_in"] = SWAP_SECONDS * len(plan.swap_in) / 2
        prompts = self._prompt_logprobs if self._prompt_logprobs.entries else None
        return StepOutput(order.astype(np.int32), ids.astype(np.int32), timings, self._logprobs(order, ids), prompts)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _physical(self, slots: Index | int, positions: Index | int) -> Index:
        """Where the KV of each slot's token at each position lies."""
        size = self.memory.block_size
        return np.asarray(
            self._rows.tables[slots, np.asarray(positions) // size].astype(np.int64) * size + positions % size
        )

    def _store(self, slots: Index | int, positions: Index, tokens: Index, hashes: Array64) -> None:
        physical = self._physical(slots, positions)
        if len(np.unique(physical)) != len(physical):
            raise PlanError("two tokens of one step are stored in the same place")
        self._token[physical] = tokens
        self._position[physical] = positions
        self._hash[physical] = hashes

    def _check_newest(self, slots: Index, newest: Index) -> None:
        """The KV of each row's newest token is that row's own: right position, and the hash of its whole prefix."""
        physical = self._physical(slots, newest)
        wrong = (self._position[physical] != newest) | (self._hash[physical] != self._prefix_hash[slots])
        if wrong.any():
            raise PlanError(f"slot {int(slots[wrong][0])} reads memory that is not its own prefix")

    def _check_whole(self, slot: int) -> None:
        length = int(self._rows.state.length[slot])
        positions = np.arange(length)
        physical = self._physical(slot, positions)
        tokens = self._token[physical].astype(np.uint64)
        chain = np.cumsum((tokens + np.uint64(1)) * self._powers[:length], dtype=np.uint64)
        if not (
            np.array_equal(self._position[physical], positions)
            and np.array_equal(self._hash[physical], chain)
            and (length == 0 or chain[-1] == self._prefix_hash[slot])
        ):
            raise PlanError(f"slot {slot} reads memory that is not its own prefix")

    def _move(self, plan: Plan, held: Index) -> None:
        """Swaps and copies, in their order, and between them the poison: a block that comes back keeps its contents."""
        self._swap(plan.swap_out, self._physical_memory, self._host)
        if self._verify:
            self._poison_new(plan, held)
        self._swap(plan.swap_in, self._host, self._physical_memory)
        self._swap(plan.copies, self._physical_memory, self._physical_memory)

    def _poison_new(self, plan: Plan, held: Index) -> None:
        """What a block held before it came into a table, behind the row's tokens, is of no use to anybody any more."""
        positions = self._position.reshape(self.memory.num_blocks, -1)
        for slot, count in zip(plan.table_slots, plan.table_lens, strict=True):
            first = -(-int(held[slot]) // self.memory.block_size)
            positions[self._rows.tables[slot, first:count]] = POISON
        positions[plan.append_blocks] = POISON

    @property
    def _physical_memory(self) -> list[npt.NDArray[Any]]:
        """Views of all that a slot holds, by block."""
        return [one.reshape(self.memory.num_blocks, -1) for one in (self._token, self._position, self._hash)]

    def _swap(self, pairs: Int32, sources: list[npt.NDArray[Any]], destinations: list[npt.NDArray[Any]]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            destination[pairs[1::2]] = source[pairs[::2]]

    # ---- the toy model ---------------------------------------------------------------------------------------------

    def _decode(self, slots: Index, positions: Index) -> None:
        if not len(slots):
            return
        self._check_newest(slots, positions - 1)
        tokens = self._last[slots]
        hashes = self._prefix_hash[slots] + (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[positions]
        self._store(slots, positions, tokens, hashes)
        self._prefix_hash[slots] = hashes
        if self._verify:
            for slot in slots.tolist():
                self._check_whole(slot)

    def _run_chunks(self, plan: Plan, held: Index) -> None:
        ends = np.cumsum(plan.chunk_lens).tolist()
        columns = zip(plan.chunk_slots, plan.chunk_starts, ends, plan.chunk_lens, plan.chunk_samples, strict=True)
        for chunk, (slot, start, end, count, samples) in enumerate(columns):
            if held[slot]:
                self._check_newest(np.asarray([slot]), held[[slot]] - 1)
            tokens = plan.tokens[end - count : end].astype(np.int64)
            positions = np.arange(start, start + count)
            terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[positions]
            before = self._hash[self._physical(slot, start - 1)] if start else np.uint64(0)
            hashes = before + np.cumsum(terms, dtype=np.uint64)
            new = positions >= held[slot]  # what is stored already is not written again: the block may be others' too
            if not np.array_equal(hashes[~new], self._hash[self._physical(slot, positions[~new])]):
                raise PlanError(f"slot {slot} computes other tokens again than those it holds")
            self._store(slot, positions[new], tokens[new], hashes[new])
            self._prefix_hash[[slot, *samples]] = hashes[-1]
            if self._verify:
                self._check_whole(slot)
            self._tell_of_given(slot, chunk, start, hashes)

    def _tell_of_given(self, slot: int, chunk: int, start: int, hashes: Array64) -> None:
        """prompt_logprobs of what a chunk from ``start`` computes the logits of, of the prompt and of a run."""
        rules, run, end = self._rules[slot], self._runs[slot], start + len(hashes)
        if rules is not None and rules.prompt_logprobs >= 0:
            targets = rules.tokens[: rules.prompt_tokens][start + 1 : end + 1]
            self._tell(chunk, hashes[: len(targets)], targets, rules.prompt_logprobs, [])
        if run is not None:
            first = max(start + 1, run.start)
            targets = run.tokens[first - run.start : max(end + 1 - run.start, 0)]
            before = hashes[first - 1 - start :][: len(targets)]
            named = rules.logprob_ids if rules is not None else []
            self._tell(chunk, before, targets, int(self._rows.logprobs[slot]), named)

    def _tell(self, chunk: int, hashes: Array64, targets: list[int], count: int, named: list[int]) -> None:
        n = len(targets)
        part = self._toy_logprobs([chunk] * n, hashes, targets, [count] * n, [named] * n)
        for column in fields(Logprobs):
            getattr(self._prompt_logprobs, column.name).extend(getattr(part, column.name))

    def _sample(self, slots: Index) -> Index:
        mixed = _mix(self._prefix_hash[slots] + self._noise(slots))
        ids = self._allowed[(mixed % np.uint64(len(self._allowed))).astype(np.int64)]
        tired = (self._rows.temperature[slots] > TIRED_ABOVE) & (mixed >> np.uint64(60) == 0)
        return np.asarray(np.where(tired, self._eos, ids))

    def _noise(self, slots: Index) -> Array64:
        """What a random row's sample depends on besides its prefix; 0 for a greedy one."""
        seed = self._rows.seed[slots].astype(np.uint64)
        return np.where(self._rows.temperature[slots] > 0, _mix(seed + np.uint64(1)), np.uint64(0))

    def _sample_masked(self, slots: Index, ids: Index, mask: Mask) -> None:
        """Samples once more what the mask is about, into ``ids``, which belong to ``slots``."""
        places = {slot: place for place, slot in enumerate(slots.tolist()) if self._rows.masked[slot]}
        words = -(-self.memory.vocab_size // 32)
        if not places.keys() >= set(mask.slots) or len(mask.bits) != len(mask.slots) * words:
            raise PlanError(f"a mask for slots {mask.slots}, but those that sample under one are {list(places)}")
        bits = np.unpackbits(np.frombuffer(mask.bits, dtype=np.uint8), bitorder="little").reshape(-1, words * 32)
        for slot, allowed in zip(mask.slots, bits, strict=True):
            tokens = np.flatnonzero(allowed)
            seed = self._noise(np.asarray([slot]))
            ids[places[slot]] = tokens[int(_mix(self._prefix_hash[[slot]] + seed)[0] % np.uint64(len(tokens)))]

    def _logprobs(self, slots: Index, ids: Index) -> Logprobs | None:
        """Toy log-probabilities: the token after the likeliest one in the vocabulary is the second likeliest, etc.

        They fall by the same gap from one to the next, which depends on the prefix. For one prefix in sixteen an EOS is
        the second likeliest.
        """
        asked = np.flatnonzero(self._rows.logprobs[slots] >= 0)
        if not len(asked):
            return None
        counts = self._rows.logprobs[slots[asked]].tolist()
        rules = (self._rules[slot] for slot in slots[asked].tolist())
        named = [row.logprob_ids if row is not None else [] for row in rules]
        return self._toy_logprobs(asked.tolist(), self._prefix_hash[slots[asked]], ids[asked].tolist(), counts, named)

    def _toy_logprobs(
        self, entries: list[int], hashes: Array64, ids: list[int], counts: list[int], named: list[list[int]]
    ) -> Logprobs:
        """Of token ``ids[i]`` after the prefix of ``hashes[i]``; ``named[i]``: what is told of for the likeliest."""
        found = Logprobs(entries, [], counts, [], [], [])
        for mixed, token, count, instead in zip(_mix(hashes).tolist(), ids, counts, named, strict=True):
            gap, size, ends = 0.125 + (mixed >> 20) % 1000 / 1000, len(self._allowed), mixed >> 60 == 0
            ranks = [
                1 if one == self._eos else (int(np.searchsorted(self._allowed, one)) - mixed) % size
                for one in (token, *instead)
            ]
            found.sampled.append(-0.125 - gap * ranks[0])
            found.ranks.append(ranks[0] + 1)
            found.top_ids.extend(instead)
            found.top.extend(-0.125 - gap * rank for rank in ranks[1:])
            for rank in range(0 if instead else count):
                found.top_ids.append(self._eos if ends and rank == 1 else int(self._allowed[(mixed + rank) % size]))
                found.top.append(-0.125 - gap * rank)
        return found


def _mix(values: Array64) -> Array64:
    """The finalizer of splitmix64: every input bit changes every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _vocabulary(folder: Path) -> tuple[int, list[int]]:
    """Vocabulary size and EOS ids in the config.json of a model folder."""
    config = json.loads((folder / "config.json").read_text())
    eos = config.get("eos_token_id")
    return int(config["vocab_size"]), eos if isinstance(eos, list) else [] if eos is None else [eos]
