"""The pure scheduler driven against the null executor's checking memory, with results as late as a test wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from services.scheduler.grammar import Grammar
from services.scheduler.invariants import check
from services.scheduler.limits import Limits
from services.scheduler.prefix_cache import Digest, digest
from services.scheduler.scheduler import Scheduler
from services.scheduler.stats import Stats
from services.worker.executor import Executor, StepOutput
from services.worker.null import BASE, NullExecutor
from shared.codec import int32
from shared.sampling import SamplingParams
from shared.wire import Accept, Done, Finished, Mask, Plan, SubmitTokens

EOS = 2
VOCAB = 64
OWNER = b"tokenizer:0:0123456789abcdef"
MASK = (1 << 64) - 1


def toy_output(prompt: list[int], count: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """The null model's answer, computed token by token with Python's integers; ends at an EOS."""
    allowed = [token for token in range(VOCAB) if token != EOS]
    total = sum((token + 1) * pow(BASE, position, 1 << 64) for position, token in enumerate(prompt)) & MASK
    position, output = len(prompt), []
    for _ in range(count):
        drawn = mixed(total + (mixed(seed + 1) if temperature > 0 else 0))
        token = EOS if temperature > 1 and drawn >> 60 == 0 else allowed[drawn % len(allowed)]
        output.append(token)
        if token == EOS:
            break
        total = (total + (token + 1) * pow(BASE, position, 1 << 64)) & MASK
        position += 1
    return output


def mixed(value: int) -> int:
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def exhaust(audit: Iterator[None]) -> None:
    """All slices of an audit."""
    deque(audit, maxlen=0)


class Simulation:
    """One scheduler, one worker, one tokenizer. Each step is planned, executed and retired by a call of its own.

    After every call the scheduler's invariants are checked, and that no block named by a step in flight is free.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_num_queued_reqs: int = 1000,
        max_model_len: int = 2048,
        vocab_size: int = VOCAB,
        digest: Digest = digest,
        max_step: float | None = 0.0,
        **policy: Any,
    ) -> None:
        """``digest`` makes the prefix cache's keys. ``policy``: further fields of Limits.

        Steps have no limit in time, which would make plans depend on the machine; else give made-up ``timings`` too.
        """
        limits = Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=min(max_model_len, (num_blocks - 1) * block_size),
            vocab_size=vocab_size,
            eos_ids=frozenset([EOS]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_queued_reqs=max_num_queued_reqs,
            max_step=max_step,
            **policy,
        )
        self.now = 0.0
        self.limits = limits
        self.scheduler = Scheduler(
            limits, Stats(limits), scheduler_epoch=1, worker_epoch=2, clock=lambda: self.now, digest=digest
        )
        self.executor = self.new_executor()
        self.timings: Callable[[Plan], dict[str, float]] | None = None  # instead of the executor's
        self.plans: list[Plan] = []
        self.sent: deque[Plan] = deque()
        self.executed: deque[tuple[int, StepOutput]] = deque()
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.finished: dict[tuple[int, int], Finished] = {}
        self.done: dict[int, Done] = {}
        self.cached: dict[int, int] = {}  # tokens of prompts, as told by the first message with tokens of a request
        self._tables: dict[int, list[int]] = {}
        self._decoding: set[int] = set()
        self._paused: set[int] = set()
        self._named: dict[int, set[int]] = {}  # step in flight → blocks it names
        self._stores: dict[int, set[int]] = {}  # step in flight → blocks it stores to
        self._lengths: dict[int, int] = {}  # tokens of each slot
        self._masked: set[int] = set()  # slots that sample under a mask
        self._sampled_under: dict[int, set[int]] = {}  # step → of these, the slots that it samples into
        self.masks: dict[int, Mask] = {}  # by step

    def new_executor(self) -> Executor:
        return NullExecutor(
            num_blocks=self.limits.num_blocks,
            host_blocks=self.limits.host_blocks,
            block_size=self.limits.block_size,
            max_model_len=self.limits.max_model_len,
            max_num_seqs=self.limits.max_num_seqs,
            vocab_size=self.limits.vocab_size,
            eos_ids=[EOS],
            verify=True,
        )

    def message(
        self,
        rid: int,
        prompt: list[int],
        max_tokens: int,
        *,
        generated: Sequence[int] = (),
        counts: Sequence[int] = (),
        priority: int = 0,
        tenant: str = "",
        timeout: float = 0.0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> SubmitTokens:
        return SubmitTokens(
            rid,
            f"req-{rid}",
            SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}),
            int32(prompt),
            priority=priority,
            tenant=tenant,
            timeout=timeout,
            cache_salt=cache_salt,
            generated=int32(generated),
            generated_counts=list(counts),
        )

    def submit(
        self,
        rid: int,
        prompt: list[int],
        max_tokens: int,
        generated: list[list[int]] | None = None,
        owner: bytes = OWNER,
        grammar: Grammar | None = None,
        **fields: Any,
    ) -> Accept | None:
        """``fields``: of the message, or of its sampling parameters."""
        known = generated or []
        message = self.message(
            rid,
            prompt,
            max_tokens,
            generated=[token for ids in known for token in ids],
            counts=[len(ids) for ids in known],
            **fields,
        )
        for index, ids in enumerate(known):
            self.outputs.setdefault((rid, index), list(ids))
        accept = self.scheduler.submit(owner, message, grammar)
        self.check()
        return accept

    def plan(self) -> Plan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.sent.append(plan)
            self._note_named(plan)
        self._take_mask()
        self.check()
        return plan

    def execute(self) -> bool:
        """The worker runs its next plan, as soon as it has its mask, if it needs one."""
        if self.sent and (not self._sampled_under[self.sent[0].step_id] or self.sent[0].step_id in self.masks):
            plan = self.sent.popleft()
            output = self.executor.execute(plan, lambda: self.masks[plan.step_id])
            if self.timings is not None:
                output = replace(output, timings=self.timings(plan))
            self.executed.append((plan.step_id, output))
            return True
        return False

    def retire(self) -> bool:
        """The next result arrives."""
        if self.executed:
            step_id, output = self.executed.popleft()
            del self._named[step_id], self._stores[step_id]
            self.scheduler.retire(
                step_id, output.slots, output.ids, output.timings, output.logprobs, output.prompt_logprobs
            )
            self._take_mask()
            self.check()
            return True
        return False

    def round(self) -> None:
        """What a busy server does: two plans in flight, then the older one's result."""
        while self.plan() is not None:
            pass
        self.execute()
        self.retire()

    def drain(self) -> None:
        self.drain_without_receiving()
        self.receive()

    def drain_without_receiving(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not (self.scheduler.steps or self.scheduler.load.running or self.scheduler.load.waiting):
                break
            self.round()
        else:
            raise AssertionError(f"not finished after {most} rounds: {self.scheduler.load}")

    def restart(self) -> None:
        """The worker lost its rows."""
        self.sent.clear()
        self.executed.clear()
        self._named.clear()
        self._stores.clear()
        self.executor = self.new_executor()
        self.scheduler.restart(worker_epoch=3)
        self.check()

    def receive(self, acknowledge: bool = True) -> None:
        """The tokenizer reads what has come."""
        for outbox in self.scheduler.streams.ready():
            message = outbox.take(self.scheduler.last_step)
            ids, start = message.ids.tolist(), 0
            columns = zip(message.rids, message.seqs, message.offsets, message.counts, strict=True)
            for rid, seq, offset, count in columns:
                output = self.outputs.setdefault((rid, seq), [])
                assert offset <= len(output), "a gap in the stream"
                piece = ids[start : start + count]
                overlap = output[offset : offset + count]
                assert overlap == piece[: len(overlap)], "a token was sent twice with two values"
                output[offset : offset + count] = piece
                start += count
            self.cached |= {cached.rid: cached.tokens for cached in message.cached}
            self.cached |= {rid: 0 for rid in message.rids if rid not in self.cached}
            for done in message.done:
                assert self.cached.get(done.rid, done.cached_tokens) == done.cached_tokens, "told otherwise at first"
            self.finished |= {(finished.rid, finished.seq): finished for finished in message.finished}
            self.done |= {done.rid: done for done in message.done}
            if acknowledge:
                self.scheduler.streams.acknowledge([done.rid for done in message.done])
        self.check()

    def blocks_of(self, rid: int) -> int:
        return sum(len(sequence.blocks) for sequence in self.scheduler.streams.requests[rid].sequences)

    def check(self) -> None:
        check(self.scheduler)
        for step, blocks in self._named.items():
            freed = [block for block in blocks if not self.scheduler.pool.references(block)]
            assert not freed, f"blocks {freed} are free while step {step} is in flight"

    def check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.streams.requests
        assert not scheduler.steps
        assert scheduler.pool.num_used == 0
        assert scheduler.rows.num_used == 0
        assert scheduler.swaps.host.num_used == 0
        assert not self._named
        assert not (scheduler.swaps.leaving or scheduler.beams.requests)

    def _take_mask(self) -> None:
        """A mask comes for each step that samples under one, and is about all who do and are not over, exactly."""
        mask = self.scheduler.mask()
        if not self.scheduler.steps:
            assert mask is None
            return
        step = self.scheduler.steps[0]
        if mask is None:
            assert step.step_id in self.masks or not self._sampled_under[step.step_id]
            return
        assert mask.step_id == step.step_id
        assert mask.step_id not in self.masks
        self.masks[mask.step_id] = mask
        slots = zip(step.slots.tolist(), step.sequences, strict=True)
        open_slots = {slot for slot, sequence in slots if sequence.finished is None}
        assert sorted(mask.slots) == sorted(self._sampled_under[mask.step_id] & open_slots)

    def _note_named(self, plan: Plan) -> None:
        """The blocks a plan names, and who samples under a mask, from the plans alone."""
        if plan.full:
            self._tables.clear()
            self._decoding.clear()
            self._paused.clear()
            self._lengths.clear()
            self._masked.clear()
        left = {slot: self._lengths[slot] for slot in plan.release}
        for slot in plan.release:
            del self._tables[slot]
            self._decoding.discard(slot)
            self._paused.discard(slot)
            self._masked.discard(slot)
        self._masked |= {row.slot for row in plan.new_rows if row.masked}
        self._paused = (self._paused | set(plan.pause)) - set(plan.resume)
        decoding = self._decoding - self._paused
        swapped = set(plan.swap_out[::2].tolist())
        written = set().union(*self._stores.values())  # others may well read what they share with it
        assert not swapped & written, "swapped out while a step in flight writes it"
        moved = swapped | set(plan.swap_in[1::2].tolist())
        start = 0
        for slot, count in zip(plan.table_slots, plan.table_lens, strict=True):
            self._tables[slot] = plan.table_blocks[start : start + count].tolist()
            start += count
        for slot, block in zip(plan.append_slots.tolist(), plan.append_blocks.tolist(), strict=True):
            self._tables[slot].append(block)
        size = self.limits.block_size
        self._lengths |= {row.slot: row.length for row in plan.new_rows}
        pending = set().union(*self._stores.values())
        copies = plan.copies.reshape(-1, 2).tolist()
        copied = {destination for _, destination in copies} | set(plan.swap_in[1::2].tolist())
        for row in plan.new_rows:
            # A fork reads what its sibling stores in this very step; who goes on with a run, what it has stored itself.
            if row.slot in plan.chunk_slots and (not row.masked or left.get(row.slot) != row.length):
                held = set(self._tables[row.slot][: -(-row.length // size)])
                read = held - copied | {source for source, destination in copies if destination in held}
                assert not read & pending, "a hit on what is not written yet"
        stores = set()
        for slot in decoding:
            stores.add(self._tables[slot][self._lengths[slot] // size])
            self._lengths[slot] += 1
        columns = zip(plan.chunk_slots, plan.chunk_starts, plan.chunk_lens, plan.chunk_samples, strict=True)
        for slot, start, count, samples in columns:
            first = max(start, self._lengths[slot])  # what is stored already is not stored again
            if start + count > first:
                stores.update(self._tables[slot][first // size : -(-(start + count) // size)])
            for one in {slot, *samples}:
                self._lengths[one] = start + count
        assert not swapped & stores, "swapped out and written by one plan"
        self._stores[plan.step_id] = stores
        sampled = {slot for samples in plan.chunk_samples for slot in samples}
        self._sampled_under[plan.step_id] = (decoding | sampled) & self._masked
        self._decoding |= sampled
        active = decoding | set(plan.chunk_slots)
        named = {block for slot in active for block in self._tables[slot]}
        self._named[plan.step_id] = named | moved | {block for pair in copies for block in pair}


def toy_candidates(tokens: list[int], count: int) -> list[tuple[int, float]]:
    """The null model's likeliest tokens after ``tokens`` and their logprobs, as ``NullExecutor._logprobs`` says."""
    total = sum((token + 1) * pow(BASE, position, 1 << 64) for position, token in enumerate(tokens)) & MASK
    drawn, allowed = mixed(total), [token for token in range(VOCAB) if token != EOS]
    gap = 0.125 + (drawn >> 20) % 1000 / 1000
    ids = [allowed[(drawn + rank) % len(allowed)] for rank in range(count)]
    if drawn >> 60 == 0 and count > 1:
        ids[1] = EOS
    return [(token, -0.125 - gap * rank) for rank, token in enumerate(ids)]


def toy_logprob(prompt: list[int], output: list[int]) -> float:
    """The null model's cumulative logprob of ``output``."""
    total = 0.0
    for place, token in enumerate(output):
        likeliest = dict(toy_candidates(prompt + output[:place], VOCAB - 1))
        second = list(likeliest.values())[1]  # an EOS's, and that of the token whose place an EOS may have taken
        total += likeliest.get(token, second)
    return total
