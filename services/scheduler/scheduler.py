"""The one owner of memory and of every request's state. Knows no socket, no text and no model.

``plan`` makes the next step while the one before still runs, and ``retire`` takes in a step's result. The rule
everything rests on: nothing that a step in flight names is given back before that step is retired. Finishing,
cancelling and preempting only take a sequence out of later plans; ``retire`` reclaims.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import numpy as np

from services.scheduler.beam_search import BeamSearch
from services.scheduler.beams import Beams
from services.scheduler.limits import Limits, split_generated
from services.scheduler.preemption import Preemption
from services.scheduler.prefix_cache import Chain, Digest, digest, encode_salt
from services.scheduler.request import Request, Sequence, State
from services.scheduler.rows import Rows
from services.scheduler.stats import Load, Stats
from services.scheduler.steps import Draft, Step
from services.scheduler.streams import Streams
from services.scheduler.swaps import Swaps
from services.scheduler.tables import NOTHING, Tables
from services.scheduler.waiting import WaitingQueue
from shared.codec import Int32, int32
from shared.errors import QuireError, RequestError
from shared.ids import client_of
from shared.logprobs import by_entry
from shared.wire import Accept, Done, Finished, Logprobs, Plan, SubmitTokens

MAX_STEPS_IN_FLIGHT = 2
LOOK_UP_AGAIN = 8  # plans after which a prompt that did not fit is looked up again: it may have more hits by now
AWAIT_STEPS = 256  # plans in which a sequence waits for another to compute what they share, at most
REMEMBER_CANCEL = 10.0  # seconds an unknown rid's CANCEL keeps its SUBMIT from running


class StepError(QuireError):
    """A result that does not belong to the oldest step in flight."""


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        stats: Stats,
        *,
        scheduler_epoch: int,
        worker_epoch: int,
        clock: Callable[[], float] = time.monotonic,
        digest: Digest = digest,
    ) -> None:
        self.limits = limits
        self.stats = stats
        self.scheduler_epoch = scheduler_epoch
        self.worker_epoch = worker_epoch
        self.tables = Tables(limits, digest)
        self.pool = self.tables.pool
        self.rows = Rows(limits.max_num_seqs)
        self.steps: deque[Step] = deque()
        self.streams = Streams()
        self.waiting = WaitingQueue(limits.scheduling_policy, limits.tenant_weights)
        self.preempted: list[Sequence] = []  # in the order they come back
        self.prefilling: list[Sequence] = []
        self.last_step = 0  # the newest step planned
        self._clock = clock
        self._full = True  # the next plan has to be a full one
        self._cancelled: dict[int, float] = {}  # rid → when its early CANCEL came
        self._arrivals = 0
        self._holdup = "turn"  # why the last plan admitted no more
        self._too_big: set[Sequence] = set()  # those it looked at that did not fit
        self.swaps = Swaps(self.tables, min(limits.host_blocks, self.pool.num_usable))
        self.beams = Beams(self.tables)
        self.preemption = Preemption(limits.preemption_mode)
        self._watermark = max(1, self.pool.num_usable // 200)

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, owner: bytes, message: SubmitTokens) -> Accept | None:
        """Takes a request in, or re-attaches ``owner`` to it when its rid is known.

        None: it was cancelled before it came. Raises RequestError when it cannot be served (400) or the queue is
        full (429; a re-submission with ``generated`` passes that limit).
        """
        known = self.streams.requests.get(message.rid)
        if known is not None:
            self.streams.attach(known, owner, message.generated_counts)
            return Accept(message.rid, len(known.prompt))
        if message.rid in self._cancelled:
            return None
        max_tokens = self.limits.check(message)
        sampling = message.sampling
        if sampling.use_beam_search:
            self.limits.check_beams(len(message.prompt_ids), max_tokens, sampling.n)
        self._check_queue(message)
        self._arrivals += 1
        request = Request(
            rid=message.rid,
            request_id=message.request_id,
            outbox=self.streams.outbox(owner),
            prompt=message.prompt_ids,
            sampling=sampling,
            max_tokens=max_tokens,
            stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.limits.eos_ids),
            priority=message.priority,
            order=self._arrivals,
            arrived=self._clock(),
            tenant=message.tenant,
            timeout=message.timeout,
        )
        salt = self.salt(message.cache_salt, message.tenant)
        generated = split_generated(message)
        generated += [[] for _ in range(sampling.best_of - sampling.n)]
        request.sequences = [Sequence(request, i, ids, Chain(salt)) for i, ids in enumerate(generated)]
        self.streams.requests[request.rid] = request
        if sampling.use_beam_search:
            request.search = BeamSearch.of(sampling, max_tokens, request.stop_ids)
            request.beams = request.sequences[:1]
            for sequence in request.sequences[1:]:
                sequence.state = State.BEAM
            self.waiting.add(request.sequences[0])
            return Accept(message.rid, len(request.prompt))
        if not len(message.generated):
            leader, *leader.forks = request.sequences
            for sequence in leader.forks:
                sequence.state = State.FORK
            self.waiting.add(leader)
            return Accept(message.rid, len(request.prompt))
        for sequence in request.sequences:
            self.waiting.add(sequence)
            if sequence.output:
                self._end_if_over(sequence)
        return Accept(message.rid, len(request.prompt))

    def cancel(self, rid: int) -> None:
        """Ends what is left of a request with FINISHED(abort); an unknown rid is remembered. Idempotent."""
        request = self.streams.requests.get(rid)
        if request is None:
            self._cancelled[rid] = self._clock()
            return
        for sequence in request.sequences:
            if sequence.finished is None:
                self._finish(sequence, "abort")

    def stop(self, rid: int, index: int, keep: int) -> None:
        """The tokenizer ends a sequence after ``keep`` tokens; wins over an end by length or EOS. Idempotent."""
        request = self.streams.requests.get(rid)
        if request is None or not 0 <= index < len(request.sequences) or keep < 0:
            return
        if request.is_held:
            return
        sequence = request.sequences[index]
        keep = min(keep, len(sequence.output))
        if sequence.finished is not None:
            if sequence.finished.reason in ("stop", "length"):
                self.stats.taken_back(len(sequence.output) - keep)
                self.streams.shorten(sequence, keep)
            self.streams.send_ends(request)
            return
        self.stats.taken_back(len(sequence.output) - keep)
        del sequence.output[keep:], sequence.logprobs[keep:]
        self._finish(sequence, "stop")

    def drop_owner(self, owner: bytes) -> int:
        """A tokenizer is gone: cancels and forgets its requests. Returns how many were open."""
        ended = self._cancel_all(self.streams.of_owner(owner))
        self.streams.forget_owner(owner)
        return ended

    def drop_client(self, client_number: int) -> int:
        """A gateway is gone: cancels its requests. Returns how many were open."""
        return self._cancel_all(r for r in self.streams.requests.values() if client_of(r.rid) == client_number)

    def end_all(self, message: str) -> int:
        """Ends every open sequence with FINISHED(error, message). Returns how many requests were open."""
        still_open = [request for request in self.streams.requests.values() if request.done is None]
        for request in still_open:
            for sequence in request.sequences:
                if sequence.finished is None:
                    self._finish(sequence, "error", message=message)
        return len(still_open)

    def expire(self) -> list[int]:
        """Once a second: ends what is too late and forgets old cancels.

        Repeats unacknowledged ends, and gives up the oldest, whose rids it returns.
        """
        now = self._clock()
        self._end_the_late(now)
        if self.waiting.shares is not None:
            tenants = {request.tenant for request in self.streams.requests.values()}
            self.waiting.shares.forget(tenants, self.waiting.tenants())
        self._cancelled = {rid: at for rid, at in self._cancelled.items() if now - at < REMEMBER_CANCEL}
        return self.streams.expire(now)

    def salt(self, cache_salt: str, tenant: str) -> bytes:
        """What has to be equal, beside the tokens, for two requests to share blocks."""
        isolated = self.limits.prefix_isolation == "tenant"
        return encode_salt(cache_salt=cache_salt, tenant=tenant if isolated else "")

    def waits_for(self, sequence: Sequence) -> str:
        """Why a sequence has no slot.

        preempted, prefix (somebody is computing what it shares with them), slots, budget (tokens of a step), memory, or
        turn (others go first).
        """
        if sequence.state is State.PREEMPTED:
            return "preempted"
        if sequence.state is State.FORK:
            sequence = next(one for one in sequence.request.sequences if sequence in one.forks)
        if sequence.awaits:
            return "prefix"
        if self._holdup != "turn":
            return self._holdup
        return "memory" if sequence in self._too_big else "turn"

    def waiting_by_reason(self) -> dict[str, int]:
        return Counter(map(self.waits_for, self.all_waiting()))

    def all_waiting(self) -> Iterator[Sequence]:
        """Everybody who waits for a slot: the preempted, then those never admitted, siblings one after another."""
        yield from self.preempted
        for leader in self.waiting:
            yield leader
            yield from leader.forks

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.preempted)

    @property
    def logical_blocks(self) -> int:
        """Blocks in the tables of all that run, shared ones as often as they are shared."""
        return sum(len(sequence.blocks) for sequence in [*self.rows.occupants(), *self.beams.between()])

    @property
    def load(self) -> Load:
        return Load(
            running=self.rows.num_used + len(self.beams.between()),
            waiting=self.num_waiting,
            preempted=len(self.preempted),
            blocks_used=self.pool.num_used,
            blocks_total=self.pool.num_usable,
            blocks_logical=self.logical_blocks,
            swapped=sum(bool(sequence.host) for sequence in self.preempted),
            host_blocks_used=self.swaps.host.num_used,
            blocks_cached=self.pool.num_cached,
        )

    # ---- steps -----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None: nothing to do, enough in flight, or memory that only a retire brings back."""
        if len(self.steps) >= MAX_STEPS_IN_FLIGHT:
            return None
        for slot in self.rows.complete():
            sequence = self._occupant(slot)
            self._vacate(sequence)
            sequence.state = State.DRAIN
        self.pool.now = self._clock()
        secure = self._secure_decode_blocks()
        swapped = [sequence for sequence in self.swaps.leaving if not self._in_flight(sequence.fence)]
        if not secure and not swapped:
            return None
        draft = Draft()
        draft.pause, draft.resume = self.rows.pause([] if secure else self._short_of_memory())
        decode_slots = self.rows.decode_slots()
        self._swap_out(draft, swapped)
        budget = self.limits.max_num_batched_tokens - len(decode_slots)
        if secure:
            self._append_blocks(draft)
            self._copy_forked_blocks(draft)
            budget -= self._plan_beams(draft)
            for sequence in list(self.prefilling):
                budget -= self._compute(draft, sequence, budget)
            budget = self._admit(draft, budget)
        self.rows.forked[decode_slots] = False
        if not len(decode_slots) and draft.is_empty:
            return None
        return self._commit(draft, decode_slots, self.limits.max_num_batched_tokens - budget)

    def retire(
        self,
        step_id: int,
        slots: Int32,
        ids: Int32,
        timings: Mapping[str, float],
        logprobs: Logprobs | None = None,
        prompt_logprobs: Logprobs | None = None,
    ) -> None:
        """Takes in the result of the oldest step in flight: its tokens count, and what it alone named is free."""
        if not self.steps or self.steps[0].step_id != step_id:
            raise StepError(f"worker rank 0 answered step {step_id}, which is not the oldest in flight")
        if not np.array_equal(slots, self.steps[0].slots) or len(ids) != len(slots):
            raise StepError(f"worker rank 0 answered other slots than those of step {step_id}")
        step = self.steps.popleft()
        now = self.pool.now = self._clock()
        self._publish(step)
        self._give_back(step)
        self._measure(step, timings)
        searches = self._take_logprobs(step, logprobs) if logprobs is not None else ()
        if prompt_logprobs is not None:
            self._take_prompt_logprobs(step, prompt_logprobs)
        delivered, shares = 0, self.waiting.shares
        for sequence, token in zip(step.sequences, ids.tolist(), strict=True):
            if sequence.finished is not None:
                continue  # the overrun row of a sequence that ended while this step was in flight
            request, output = sequence.request, sequence.output
            if request.first_token is None:
                request.first_token = now
                self.stats.prompt_computed(len(request.prompt))
                self.stats.prompt_cached(len(request.prompt), request.cached_tokens)
            if request.search is not None:
                continue
            output.append(token)
            if not request.is_held:
                self.streams.token(sequence)
            delivered += 1
            if shares is not None:
                shares.serve(request.tenant, output_tokens=1)
            if token in request.stop_ids or len(output) >= request.max_tokens:
                self._end_if_over(sequence)
        self.stats.cache_events(*self.tables.take_counts())
        for request in searches:
            delivered += self._advance_beams(request)
        self.stats.delivered(delivered)
        self.stats.stepped(step.tokens, now)

    def restart(self, worker_epoch: int) -> None:
        """Gives up all steps in flight: the worker keeps no rows, everything is computed again from tokens."""
        self.worker_epoch = worker_epoch
        lost = {sequence for step in self.steps for sequence in step.sequences if sequence.state is State.DRAIN}
        while self.steps:
            self._give_back(self.steps.popleft())
        for sequence in [*self.rows.occupants(), *self.beams.between()]:
            self._preempt(sequence)
        for sequence in self.preempted:  # what the worker holds for them on the host counts as lost too
            self._forget_swapped(sequence)
        self.tables.clear()
        for sequence in lost:
            sequence.state = State.PREEMPTED
            insort(self.preempted, sequence, key=_return_key)
        self._full = True

    # ---- within ----------------------------------------------------------------------------------------------------

    def _check_queue(self, message: SubmitTokens) -> None:
        """Raises RequestError 429 when the queue is full, beyond what can start at once."""
        limits, rows = self.limits, self.rows.num_free
        if message.generated_counts:
            return
        n, tokens = message.sampling.n, message.sampling.n * len(message.prompt_ids)
        room = self.pool.num_available * limits.block_size if rows else 0
        if len(self.waiting) + n > limits.max_num_queued_reqs + rows:
            name, problem = "max_num_queued_reqs", f"{len(self.waiting)} requests are waiting already"
        elif limits.max_num_queued_tokens is not None and self.waiting.tokens + tokens > (
            limits.max_num_queued_tokens + room
        ):
            name = "max_num_queued_tokens"
            problem = f"{self.waiting.tokens} prompt tokens are waiting already, and this request has {tokens}"
        else:
            return
        self.stats.rejected(name)
        raise RequestError(
            f"{problem} ({name} is {getattr(limits, name)})",
            status=429,
            code="queue_full",
            retry_after=self.stats.retry_after(self.waiting.tokens, len(self.waiting), self._clock()),
        )

    def _end_the_late(self, now: float) -> None:
        """Ends requests that waited for too long or are past their deadline, running or not."""
        limit = self.limits.max_queue_time
        for request in [request for request in self.streams.requests.values() if request.done is None]:
            waited, waiting = now - request.arrived, request.scheduled is None
            if now >= request.deadline:
                code = "queue_timeout" if waiting else "deadline_exceeded"
                message = f"not complete {waited:.1f} s after its arrival: timeout is {request.timeout:g} s"
            elif waiting and waited >= limit and not any(sequence.output for sequence in request.sequences):
                code, message = "queue_timeout", f"waited {waited:.1f} s: max_queue_time is {limit:g} s"
            else:
                continue
            self.stats.expired(code)
            for sequence in request.sequences:
                if sequence.finished is None:
                    self._finish(sequence, "error", message=message, code=code)

    def _cancel_all(self, requests: Iterable[Request]) -> int:
        still_open = [request.rid for request in requests if request.done is None]
        for rid in still_open:
            self.cancel(rid)
        return len(still_open)

    def _occupant(self, slot: int) -> Sequence:
        sequence = self.rows.sequences[slot]
        assert sequence is not None
        return sequence

    def _end_if_over(self, sequence: Sequence) -> None:
        """Finishes a sequence whose last token ends it."""
        request, token = sequence.request, sequence.output[-1]
        if token in request.stop_ids:
            is_eos = token in self.limits.eos_ids and not request.sampling.ignore_eos
            self._finish(sequence, "stop", stop_reason="" if is_eos else str(token))
        elif len(sequence.output) >= request.max_tokens:
            self._finish(sequence, "length")

    def _finish(
        self, sequence: Sequence, reason: str, *, stop_reason: str = "", message: str = "", code: str = ""
    ) -> None:
        request = sequence.request
        self._leave_queues(sequence)
        self._hand_over_forks(sequence)
        if sequence.slot >= 0 or (sequence.state is State.BEAM and sequence.blocks):
            self._vacate(sequence)
        self._forget_swapped(sequence)
        sequence.state = State.FINISHED
        finished = Finished(request.rid, sequence.index, len(sequence.output), reason, stop_reason, message, code)
        self.streams.end(sequence, finished)
        if all(one.finished is not None for one in request.sequences):
            now = self._clock()
            if request.is_held:
                self._answer_held(request)
            self.streams.complete(request, _done(request, now), now)
            self.stats.ended(request, now)

    def _leave_queues(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.PREEMPTED:
            self.preempted.remove(sequence)
        elif sequence.state is State.PREFILL:
            self.prefilling.remove(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Takes a sequence out of all later plans. Its blocks come back when the last step naming them is retired."""
        if sequence.state is State.DECODE:
            sequence.fence = self.last_step  # a decoding row is in every plan
        if sequence.slot >= 0:
            self.rows.vacate(sequence.slot)
        sequence.slot = -1
        if not sequence.host:  # else its blocks are still to be swapped out
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if self._in_flight(sequence.fence):
            self._step(sequence.fence).vacated.append(sequence)
        else:
            self.tables.release(sequence)

    def _step(self, step_id: int) -> Step:
        return self.steps[step_id - self.steps[0].step_id]

    def _give_back(self, step: Step) -> None:
        """A step is not in flight any more: what it was the last to name is given back."""
        self.swaps.host.release(step.host)
        self.pool.release(step.pins, step.step_id)  # before the tables: a source is evicted before its parents
        for sequence in step.vacated:
            self.tables.release(sequence)

    def _publish(self, step: Step) -> None:
        """Blocks that this step filled may be found by others from now on."""
        if not self.limits.enable_prefix_caching:
            return
        for i in np.flatnonzero(step.lengths % self.limits.block_size == 0).tolist():
            self.tables.publish(step.sequences[i], int(step.lengths[i]))
        for sequence, length in step.chunks:
            self.tables.publish(sequence, length)

    def _hand_over_forks(self, sequence: Sequence) -> None:
        """A sequence ends; siblings that were to sample from its prompt's last position still want to."""
        if sequence.state is State.FORK:
            leader = next(one for one in sequence.request.sequences if sequence in one.forks)
            if leader.state is State.WAITING:
                self.waiting.drop_fork(leader, sequence)
            else:
                leader.forks.remove(sequence)
        elif sequence.forks:
            heir, *heir.forks = sequence.forks
            sequence.forks = []
            heir.state = State.WAITING
            self.waiting.add(heir)

    def _in_flight(self, step_id: int) -> bool:
        """Whether that step, or the one that is being planned, is not retired yet."""
        return step_id > self.last_step or (bool(self.steps) and step_id >= self.steps[0].step_id)

    def _preempt_group(self) -> None:
        """The next victims lose their memory, or take it to the host."""
        group = self.preemption.victims([*self.rows.occupants(), *self.beams.between()])
        for sequence in group:
            if sequence.state is State.DECODE:
                sequence.cached = int(self.rows.length[sequence.slot])
            elif sequence.state is State.BEAM:
                sequence.cached = self.beams.stored(sequence, self._in_flight)
            else:
                sequence.cached = sequence.computed
        size, host_free = self.limits.block_size, self.swaps.host.num_free
        decision = self.preemption.decide(group, size, self.last_step + 1, host_free)
        self.stats.group_preempted(decision.mode)
        if decision.mode == "swap":
            self.swaps.start(group)
        for sequence in group:
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's memory, never its tokens: one in flight still counts when it arrives."""
        self._leave_queues(sequence)
        self._vacate(sequence)
        sequence.state = State.PREEMPTED
        sequence.offer = None
        sequence.preemptions += 1
        insort(self.preempted, sequence, key=_return_key)
        self.stats.preempted()

    def _secure_decode_blocks(self) -> bool:
        """Whether every decoding row can get the block its next token needs, preempting others for it.

        False: blocks are on their way back from steps in flight, which is cheaper to wait for than another victim.
        """
        while self._blocks_needed() > self.pool.num_available:
            if self.swaps.leaving or any(step.gives_back for step in self.steps):
                return False
            self._preempt_group()
        return True

    def _blocks_needed(self) -> int:
        """Blocks that decoding rows and beams take in the next step."""
        beams = self.beams.blocks_needed(self.beams.ready(self._in_flight)) if self.beams.requests else 0
        return len(self.rows.needing_block()) + self._copies_needed() + beams

    def _short_of_memory(self) -> list[int]:
        """Decoding slots that need a block for their next token; they pause while victims are swapped out for them."""
        return [*self.rows.needing_block(), *self.rows.writing_to_forked()]

    def _swap_out(self, draft: Draft, sequences: list[Sequence]) -> None:
        draft.swapped, draft.swap_out = sequences, self.swaps.take_out(sequences)
        for sequence in sequences:
            sequence.fence = self.last_step + 1
        for decision in {id(one): one for sequence in sequences if (one := sequence.preempted_by)}.values():
            draft.efforts.append((decision, "swap_out", decision.blocks))

    def _forget_swapped(self, sequence: Sequence) -> None:
        """Whatever a sequence has on the host, or on the way there, is of no use any more."""
        if sequence in self.swaps.leaving:
            self._release(sequence)
            self.swaps.host.release(self.swaps.forget(sequence))
        elif self._in_flight(sequence.fence):
            self._step(sequence.fence).host.extend(self.swaps.forget(sequence))
        else:
            self.swaps.host.release(self.swaps.forget(sequence))

    def _bring_back(self, draft: Draft, first: Sequence, budget: int) -> int | None:
        """Admits the swapped group of ``first``, all of it or nothing (None); returns how many tokens it computes."""
        group = [sequence for sequence in self.preempted if sequence.host and sequence.request is first.request]
        rows = sum(1 + len(sequence.forks) for sequence in group)
        if rows > min(self._num_free_rows, budget) or any(self._in_flight(sequence.fence) for sequence in group):
            return None
        for sequence in group:
            sequence.feed = np.concatenate([sequence.request.prompt, int32(sequence.output)])
        moves = self.swaps.bring_back(group, slack=self._watermark if self.rows.num_used else 0)
        if moves is None:
            if not self.pool.num_used:  # it never fits as a whole, but its sequences do one after another
                for sequence in group:
                    self._forget_swapped(sequence)
            return None
        draft.swap_in += moves
        if first.preempted_by is not None:
            draft.efforts.append((first.preempted_by, "swap_in", len(moves)))
        left = budget
        for sequence in group:
            draft.host += self.swaps.forget(sequence)
            sequence.computed = min(sequence.cached, len(sequence.feed) - 1)
            left -= self._enter(draft, sequence, left)
        return budget - left

    def _enter(self, draft: Draft, sequence: Sequence, budget: int) -> int:
        """Gives a sequence that has its table a slot, and plans its first chunk; returns the chunk's length."""
        self._leave_queues(sequence)
        sequence.state = State.PREFILL
        sequence.slot = self.rows.occupy(sequence)
        sequence.fence = self.last_step + 1
        self.prefilling.append(sequence)
        if sequence.request.search is not None:
            self.beams.requests[sequence.request] = None
        draft.new_row(sequence, self.rows.generations[sequence.slot], sequence.cached)
        return self._compute(draft, sequence, budget, new=True)

    def _measure(self, step: Step, timings: Mapping[str, float]) -> None:
        """What a step took: for the costs to predict from, and for the preemptions that it carries out."""
        amounts = {"forward": step.tokens, **step.moved}
        self.preemption.costs.observe(timings, amounts, prompt_tokens=step.tokens - len(step.lengths))
        for decision, part, amount in step.efforts:
            decision.measured += timings.get(part, 0.0) * amount / max(amounts.get(part, 0), 1)

    def _append_blocks(self, draft: Draft) -> None:
        for slot in self.rows.needing_block():
            sequence = self._occupant(slot)
            (block,) = self.tables.grow(sequence, 1, "output")
            self.rows.capacity[slot] += self.limits.block_size
            draft.append(slot, block)

    def _written_next(self, slot: int) -> tuple[Sequence, int]:
        """A decoding sequence, and where in its table the block is that its next token is stored in."""
        return self._occupant(slot), int(self.rows.length[slot]) // self.limits.block_size

    def _copies_needed(self) -> int:
        return self.tables.copies_needed(map(self._written_next, self.rows.writing_to_forked()))

    def _copy_forked_blocks(self, draft: Draft) -> None:
        """Whoever writes to a block that others hold too gets a copy of it; the last of them writes in place."""
        for slot in self.rows.writing_to_forked():
            sequence, index = self._written_next(slot)
            copy = self.tables.unshare(sequence, index, self.last_step + 1)
            if copy is not None:
                draft.copy(*copy)
                self.stats.copied("write")
                draft.table(slot, sequence.blocks)

    def _compute(self, draft: Draft, sequence: Sequence, budget: int, *, new: bool = False) -> int:
        """Plans the next chunk of a prompt within ``budget`` tokens and the free blocks; returns its length."""
        size, start, total = self.limits.block_size, sequence.computed, len(sequence.feed)
        room = (len(sequence.blocks) + self.pool.num_available) * size - start
        count = min(budget, room, total - start)
        if count <= 0:
            if new:
                draft.table(sequence.slot, sequence.blocks)
            return 0
        end = start + count
        missing = self.limits.blocks_for(end) - len(sequence.blocks)
        if missing > 0:
            self.tables.grow(sequence, missing, "prompt")
        if missing > 0 or new:
            draft.table(sequence.slot, sequence.blocks)
        sequence.computed = end
        sequence.fence = self.last_step + 1
        if sequence.preempted_by is not None:
            draft.efforts.append((sequence.preempted_by, "forward", count))
        if end == total:
            self.prefilling.remove(sequence)
            samples = self._start_decoding(draft, sequence, start)
        else:
            samples = []
        draft.chunk(sequence, start, sequence.feed[start:end], samples)
        return count

    def _start_decoding(self, draft: Draft, leader: Sequence, start: int) -> list[Sequence]:
        """The sequences that sample from the last position of a prompt, whose last chunk begins at ``start``.

        The forks of ``leader`` enter with rows of their own, and share all of its blocks.
        """
        request, total = leader.request, len(leader.feed)
        if request.search is not None:
            leader.state, leader.preempted_by = State.BEAM, None
            draft.beams.append(leader)
            return [leader]
        group = [leader, *leader.forks]
        for sequence in leader.forks:
            self.tables.fork(leader, sequence)
            sequence.slot = self.rows.occupy(sequence)
            sequence.fence, sequence.feed = leader.fence, leader.feed
            draft.new_row(sequence, self.rows.generations[sequence.slot], max(start, leader.cached))
            draft.table(sequence.slot, sequence.blocks)
        leader.forks = []
        for sequence in group:
            sequence.state = State.DECODE
            sequence.preempted_by = None
            self.rows.capacity[sequence.slot] = len(sequence.blocks) * self.limits.block_size
            self.rows.start_decoding(sequence.slot, total, len(request.prompt) + request.max_tokens - 1)
            self.rows.forked[sequence.slot] = len(group) > 1
        return group

    def _admit(self, draft: Draft, budget: int) -> int:
        """Gives free slots to preempted, then to waiting sequences, in order; returns what is left of ``budget``.

        Only whole prompts are admitted, with blocks to spare for those already running, so that prompts that hold
        half of what they need never wait for one another. A prompt still in prefill although there is budget left
        waits for memory, which decodes took after its admission: nobody may take it next.
        """
        self._too_big.clear()
        while budget > 0 and not self.prefilling and self._num_free_rows > 0:
            if self.preempted and self.preempted[0].host:
                computed = self._bring_back(draft, self.preempted[0], budget)
                if computed is not None:
                    budget -= computed
                elif self.preempted[0].host:
                    break
                continue
            sequence = self._next_to_admit(draft)
            if sequence is None:
                break
            request = sequence.request
            if request.scheduled is None:
                request.scheduled = self._clock()
                self.stats.scheduled(request, request.scheduled)
                if self.waiting.shares is not None:
                    self.waiting.shares.serve(request.tenant, prompt_tokens=len(request.prompt))
                request.cached_tokens = min(sequence.computed, len(request.prompt))
                self.stats.looked_up(len(sequence.feed), sequence.computed)
            budget -= self._enter(draft, sequence, budget)
        self._holdup = (
            "budget" if budget <= 0 else "memory" if self.prefilling else "turn" if self._num_free_rows > 0 else "slots"
        )
        return budget

    def _next_to_admit(self, draft: Draft) -> Sequence | None:
        """Preempted sequences in order, then who waits; smaller ones pass the first, boundedly, if it has no room."""
        if self.preempted:
            first = self.preempted[0]  # its last token may still be on its way
            return first if not self._in_flight(first.fence) and self._place(first, draft) else None
        for sequence in self.waiting.candidates():
            if self._place(sequence, draft):
                for passed in self._too_big:
                    passed.passes += 1
                return sequence
            if not sequence.awaits:
                self._too_big.add(sequence)
        return None

    def _place(self, sequence: Sequence, draft: Draft) -> bool:
        """Gives a sequence that waits the blocks that are cached for it, if there is room for all that it still needs.

        It waits instead while somebody else computes what comes next of its prompt, for AWAIT_STEPS at most.
        """
        if self._num_free_rows < self._rows_needed(sequence):
            return False
        step_id, slack = self.last_step + 1, self._watermark if self.rows.num_used else 0
        patient = not sequence.awaits or step_id - sequence.awaits < AWAIT_STEPS
        if sequence.awaits and patient and self.tables.is_key_being_written(sequence):
            return False
        if sequence.missing > self.pool.num_available - slack and self.steps and step_id % LOOK_UP_AGAIN:
            return False
        if len(sequence.feed) != sequence.num_tokens:
            sequence.feed = np.concatenate([sequence.request.prompt, int32(sequence.output)])
        # What tells the logprobs of a prompt computes all of it.
        look_up = sequence.request.missing_prompt_logprobs < 0
        match = self.tables.look_up(sequence) if look_up else NOTHING
        if look_up and patient and self.tables.is_being_written(sequence, match):
            sequence.awaits = sequence.awaits or step_id
            return False
        adopted = self.tables.adopt(sequence, match, slack=slack, step_id=step_id)
        if adopted is None:
            return False
        sequence.cached, source = adopted
        sequence.computed = min(sequence.cached, len(sequence.feed) - 1)
        sequence.awaits = 0
        if source:
            draft.copy(source, sequence.blocks[-1])
            self.stats.copied("prefix")
        return True

    @property
    def _num_free_rows(self) -> int:
        """Rows that nobody has or will need to go on."""
        return self.rows.num_free - (self.beams.reserved() if self.beams.requests else 0)

    def _rows_needed(self, sequence: Sequence) -> int:
        """Rows for all that the admission of a sequence brings with it."""
        request = sequence.request
        if request.search is None:
            return 1 + len(sequence.forks)
        return 1 if request in self.beams.requests else len(request.sequences)

    def _plan_beams(self, draft: Draft) -> int:
        """Plans one token of each beam that is ready; returns how many those are."""
        ready = self.beams.ready(self._in_flight) if self.beams.requests else []
        for beam in ready:
            last = beam.num_tokens - 1
            _, index = self.beams.written_next(beam)
            if index == len(beam.blocks):
                self.tables.grow(beam, 1, "output")
            elif (copy := self.tables.unshare(beam, index, self.last_step + 1)) is not None:
                draft.copy(*copy)
                self.stats.copied("write")
            beam.slot, beam.fence = self.rows.occupy(beam), self.last_step + 1
            draft.new_row(beam, self.rows.generations[beam.slot], last)
            draft.table(beam.slot, beam.blocks)
            draft.chunk(beam, last, int32(beam.output[-1:]), [beam])
            draft.beams.append(beam)
        return len(ready)

    def _take_logprobs(self, step: Step, logprobs: Logprobs) -> list[Request]:
        """Keeps and adds up logprobs, and gives beams their offers. Returns the requests of these."""
        searches = dict[Request, None]()
        for entry, found in by_entry(logprobs):
            sequence = step.sequences[entry]
            if sequence.state is State.BEAM:
                _, _, top_ids, top = found
                sequence.offer = list(zip(top_ids, top, strict=True))
                searches[sequence.request] = None
            elif sequence.finished is None and sequence.request.search is None:
                sequence.cumulative += found[0]
                if sequence.request.sampling.logprobs >= 0:
                    sequence.logprobs.append(found)
        return list(searches)

    def _take_prompt_logprobs(self, step: Step, logprobs: Logprobs) -> None:
        """Keeps those that are new: a prompt that is computed again tells them again."""
        for chunk, found in groupby(by_entry(logprobs), key=itemgetter(0)):
            sequence, end = step.chunks[chunk]
            known, tokens = sequence.request.prompt_logprobs, [one for _, one in found]
            first = min(end, len(sequence.request.prompt) - 1) - len(tokens)  # counted from the second token
            known += tokens[len(known) - first :]

    def _advance_beams(self, request: Request) -> int:
        """One step of a search, when all its beams have their offers; returns the tokens of the answer at its end."""
        search = request.search
        assert search is not None
        if not self.beams.advance(request, search):
            return 0
        for sequence, hypothesis in zip(request.sequences, search.hypotheses, strict=True):
            sequence.output, sequence.cumulative = hypothesis.tokens, hypothesis.cumulative
        if self.waiting.shares is not None:
            output = sum(len(sequence.output) for sequence in request.sequences)
            self.waiting.shares.serve(request.tenant, output_tokens=output)
        for sequence in list(request.sequences):
            self._end_if_over(sequence)
        return sum(len(sequence.output) for sequence in request.sequences)

    def _answer_held(self, request: Request) -> None:
        """Everything of a request with beams or best_of is over: its best sequences are the answer."""
        self.beams.requests.pop(request, None)
        chosen = request.sequences
        ends = [sequence.finished for sequence in chosen if sequence.finished is not None]
        if broken := next((end for end in ends if end.reason in ("abort", "error")), None):
            for sequence in chosen:  # what there is of it was to be no answer yet
                sequence.output, sequence.finished = [], replace(broken, tokens=0)
        if request.search is None:
            chosen = sorted(chosen, key=lambda sequence: -sequence.cumulative)[: request.sampling.n]
        self.streams.answer(request, chosen)

    def _commit(self, draft: Draft, decode_slots: np.ndarray[tuple[int], np.dtype[np.int64]], tokens: int) -> Plan:
        self.last_step += 1
        self.rows.length[decode_slots] += 1
        sequences = [self._occupant(slot) for slot in decode_slots.tolist()] + draft.sampled
        slots = np.concatenate([decode_slots, [sequence.slot for sequence in draft.sampled]]).astype(np.int32)
        self.steps.append(
            Step(
                step_id=self.last_step,
                slots=slots,
                sequences=sequences,
                lengths=self.rows.length[decode_slots],
                chunks=draft.chunks,
                pins=draft.pins,
                tokens=tokens,
                sent=self.pool.now,
                moved={"swap_out": len(draft.swap_out), "swap_in": len(draft.swap_in)},
                efforts=draft.efforts,
                host=draft.host,
                vacated=draft.swapped,
            )
        )
        release = self.rows.take_leaving()
        for beam in draft.beams:  # their rows are for this step alone; the next plan releases them
            self.rows.vacate(beam.slot)
            beam.slot = -1
        full, self._full = self._full, False
        return draft.plan(
            self.last_step,
            self.scheduler_epoch,
            self.worker_epoch,
            full=full,
            decodes=len(decode_slots),
            release=[] if full else release,
        )


def _return_key(sequence: Sequence) -> tuple[int, int, int]:
    return (sequence.request.priority, sequence.request.order, sequence.index)


def _done(request: Request, now: float) -> Done:
    scheduled = now if request.scheduled is None else request.scheduled
    first_token = now if request.first_token is None else request.first_token
    return Done(
        rid=request.rid,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens,
        completion_tokens=sum(len(sequence.output) for sequence in request.sequences),
        queue_time=scheduled - request.arrived,
        prefill_time=first_token - scheduled,
        decode_time=now - first_token,
        preemptions=request.preemptions,
    )
