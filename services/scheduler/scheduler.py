"""The one owner of memory and of every request's state. Knows no socket, no text and no model.

``plan`` makes the next step while the one before still runs, and ``retire`` takes in a step's result. The rule
everything rests on: nothing that a step in flight names is given back before that step is retired. Finishing,
cancelling and preempting only take a sequence out of later plans; ``retire`` reclaims.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

import numpy as np

from services.scheduler.block_pool import BlockPool
from services.scheduler.limits import Limits, split_generated
from services.scheduler.request import Request, Sequence, State
from services.scheduler.rows import Rows
from services.scheduler.stats import Load, Stats
from services.scheduler.steps import Draft, Step
from services.scheduler.streams import Streams
from shared.codec import Int32, int32, no_ids
from shared.errors import QuireError, RequestError
from shared.ids import client_of
from shared.wire import Accept, Done, Finished, Plan, SubmitTokens

MAX_STEPS_IN_FLIGHT = 2
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
    ) -> None:
        self.limits = limits
        self.stats = stats
        self.scheduler_epoch = scheduler_epoch
        self.worker_epoch = worker_epoch
        self.pool = BlockPool(limits.num_blocks)
        self.rows = Rows(limits.max_num_seqs)
        self.steps: deque[Step] = deque()
        self.streams = Streams()
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.preempted: list[Sequence] = []  # in the order they come back
        self.prefilling: list[Sequence] = []
        self.last_step = 0  # the newest step planned
        self._clock = clock
        self._full = True  # the next plan has to be a full one
        self._cancelled: dict[int, float] = {}  # rid → when its early CANCEL came
        self._arrivals = 0
        self.waiting_tokens = 0
        self._watermark = max(1, self.pool.num_usable // 100)

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
        )
        request.sequences = [Sequence(request, i, ids) for i, ids in enumerate(split_generated(message))]
        self.streams.requests[request.rid] = request
        for sequence in request.sequences:
            self.waiting[sequence] = None
            self.waiting_tokens += len(request.prompt)
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
        sequence = request.sequences[index]
        keep = min(keep, len(sequence.output))
        if sequence.finished is not None:
            if sequence.finished.reason in ("stop", "length"):
                self.stats.taken_back(len(sequence.output) - keep)
                self.streams.shorten(sequence, keep)
            self.streams.send_ends(request)
            return
        self.stats.taken_back(len(sequence.output) - keep)
        del sequence.output[keep:]
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
        """Once a second: forgets old cancels, repeats unacknowledged ends, gives up the oldest (returned)."""
        now = self._clock()
        self._cancelled = {rid: at for rid, at in self._cancelled.items() if now - at < REMEMBER_CANCEL}
        return self.streams.expire(now)

    @property
    def load(self) -> Load:
        return Load(
            running=self.rows.num_used,
            waiting=len(self.waiting) + len(self.preempted),
            preempted=len(self.preempted),
            blocks_used=self.pool.num_used,
            blocks_total=self.pool.num_usable,
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
        if not self._secure_decode_blocks():
            return None
        draft = Draft()
        decode_slots = self.rows.decode_slots()
        self._append_blocks(draft)
        budget = self.limits.max_num_batched_tokens - len(decode_slots)
        for sequence in list(self.prefilling):
            budget -= self._compute(draft, sequence, budget)
        budget = self._admit(draft, budget)
        if not len(decode_slots) and not draft.has_chunks:
            return None
        return self._commit(draft, decode_slots, self.limits.max_num_batched_tokens - budget)

    def retire(self, step_id: int, slots: Int32, ids: Int32) -> None:
        """Takes in the result of the oldest step in flight: its tokens count, and what it alone named is free."""
        if not self.steps or self.steps[0].step_id != step_id:
            raise StepError(f"worker rank 0 answered step {step_id}, which is not the oldest in flight")
        if not np.array_equal(slots, self.steps[0].slots) or len(ids) != len(slots):
            raise StepError(f"worker rank 0 answered other slots than those of step {step_id}")
        step = self.steps.popleft()
        now = self._clock()
        delivered = 0
        for sequence, token in zip(step.sequences, ids.tolist(), strict=True):
            if sequence.finished is not None:
                continue  # the overrun row of a sequence that ended while this step was in flight
            request, output = sequence.request, sequence.output
            if request.first_token is None:
                request.first_token = now
                self.stats.prompt_computed(len(request.prompt))
            request.outbox.token(request.rid, sequence.index, len(output), token)
            output.append(token)
            delivered += 1
            if token in request.stop_ids or len(output) >= request.max_tokens:
                self._end_if_over(sequence)
        self.pool.release(step.reclaim)
        self.stats.delivered(delivered)
        self.stats.stepped(step.tokens, now)

    def restart(self, worker_epoch: int) -> None:
        """Gives up all steps in flight: the worker keeps no rows, everything is computed again from tokens."""
        self.worker_epoch = worker_epoch
        lost = {sequence for step in self.steps for sequence in step.sequences if sequence.state is State.DRAIN}
        while self.steps:
            self.pool.release(self.steps.popleft().reclaim)
        for sequence in self.rows.occupants():
            self._preempt(sequence)
        for sequence in lost:
            sequence.state = State.PREEMPTED
            insort(self.preempted, sequence, key=_return_key)
        self._full = True

    # ---- within ----------------------------------------------------------------------------------------------------

    def _check_queue(self, message: SubmitTokens) -> None:
        bound = self.limits.max_num_queued_reqs + self.rows.num_free
        if message.generated_counts or len(self.waiting) + message.sampling.n <= bound:
            return
        self.stats.rejected()
        raise RequestError(
            f"{len(self.waiting)} requests are waiting already (max_num_queued_reqs is "
            f"{self.limits.max_num_queued_reqs})",
            status=429,
            code="queue_full",
            retry_after=self.stats.retry_after(self.waiting_tokens, len(self.waiting), self._clock()),
        )

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

    def _finish(self, sequence: Sequence, reason: str, *, stop_reason: str = "", message: str = "") -> None:
        request = sequence.request
        self._leave_queues(sequence)
        if sequence.slot >= 0:
            self._vacate(sequence)
        sequence.state = State.FINISHED
        sequence.feed = no_ids()
        finished = Finished(request.rid, sequence.index, len(sequence.output), reason, stop_reason, message)
        self.streams.end(sequence, finished)
        if all(one.finished is not None for one in request.sequences):
            now = self._clock()
            self.streams.complete(request, _done(request, now), now)
            self.stats.ended(request, now)

    def _leave_queues(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            del self.waiting[sequence]
            self.waiting_tokens -= len(sequence.request.prompt)
        elif sequence.state is State.PREEMPTED:
            self.preempted.remove(sequence)
        elif sequence.state is State.PREFILL:
            self.prefilling.remove(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Takes a sequence out of all later plans. Its blocks come back when the last step naming them is retired."""
        if sequence.state is State.DECODE:
            sequence.fence = self.last_step  # a decoding row is in every plan
        self.rows.vacate(sequence.slot)
        sequence.slot = -1
        blocks, sequence.blocks = sequence.blocks, []
        blocks.reverse()  # so that the free list hands them out in ascending order again
        if self._in_flight(sequence.fence):
            self.steps[sequence.fence - self.steps[0].step_id].reclaim.extend(blocks)
        else:
            self.pool.release(blocks)

    def _in_flight(self, step_id: int) -> bool:
        return bool(self.steps) and step_id >= self.steps[0].step_id

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's memory, never its tokens: one in flight still counts when it arrives."""
        self._leave_queues(sequence)
        self._vacate(sequence)
        sequence.state = State.PREEMPTED
        sequence.feed = no_ids()
        sequence.preemptions += 1
        insort(self.preempted, sequence, key=_return_key)
        self.stats.preempted()

    def _secure_decode_blocks(self) -> bool:
        """Whether every decoding row can get the block its next token needs, preempting others for it.

        False: blocks are on their way back from steps in flight, which is cheaper to wait for than another victim.
        """
        while len(self.rows.needing_block()) > self.pool.num_free:
            if any(step.reclaim for step in self.steps):
                return False
            self._preempt(max(self.rows.occupants(), key=lambda sequence: sequence.victim_key))
        return True

    def _append_blocks(self, draft: Draft) -> None:
        for slot in self.rows.needing_block():
            sequence = self._occupant(slot)
            (block,) = self.pool.allocate(1, after=sequence.blocks[-1])
            sequence.blocks.append(block)
            self.rows.capacity[slot] += self.limits.block_size
            draft.append(slot, block)

    def _compute(self, draft: Draft, sequence: Sequence, budget: int) -> int:
        """Plans the next chunk of a prompt within ``budget`` tokens and the free blocks; returns its length."""
        size, start, total = self.limits.block_size, sequence.computed, len(sequence.feed)
        room = (len(sequence.blocks) + self.pool.num_free) * size - start
        count = min(budget, room, total - start)
        if count <= 0:
            return 0
        end = start + count
        missing = self.limits.blocks_for(end) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing, after=sequence.blocks[-1] if sequence.blocks else 0)
            draft.table(sequence.slot, sequence.blocks)
        draft.chunk(sequence, start, sequence.feed[start:end], final=end == total)
        sequence.computed = end
        sequence.fence = self.last_step + 1
        if end == total:
            self.prefilling.remove(sequence)
            sequence.state = State.DECODE
            sequence.feed = no_ids()
            slot, request = sequence.slot, sequence.request
            self.rows.capacity[slot] = len(sequence.blocks) * size
            self.rows.start_decoding(slot, total, len(request.prompt) + request.max_tokens - 1)
        return count

    def _admit(self, draft: Draft, budget: int) -> int:
        """Gives free slots to preempted, then to waiting sequences, in order; returns what is left of ``budget``.

        Only whole prompts are admitted, with blocks to spare for those already running, so that prompts that hold
        half of what they need never wait for one another. A prompt still in prefill although there is budget left
        waits for memory, which decodes took after its admission: nobody may take it next.
        """
        while budget > 0 and not self.prefilling and self.rows.num_free:
            sequence = self.preempted[0] if self.preempted else next(iter(self.waiting), None)
            if sequence is None or self._in_flight(sequence.fence):
                break  # a preempted sequence's last token is still on its way
            spare = self._watermark if self.rows.num_used else 0
            if self.limits.blocks_for(sequence.num_tokens) > self.pool.num_free - spare:
                break
            self._leave_queues(sequence)
            request = sequence.request
            if request.scheduled is None:
                request.scheduled = self._clock()
                self.stats.scheduled(request, request.scheduled)
            sequence.state = State.PREFILL
            sequence.feed = np.concatenate([request.prompt, int32(sequence.output)])
            sequence.computed = 0
            sequence.slot = self.rows.occupy(sequence)
            self.prefilling.append(sequence)
            draft.new_row(sequence, self.rows.generations[sequence.slot])
            budget -= self._compute(draft, sequence, budget)
        return budget

    def _commit(self, draft: Draft, decode_slots: np.ndarray[tuple[int], np.dtype[np.int64]], tokens: int) -> Plan:
        self.last_step += 1
        self.rows.length[decode_slots] += 1
        sequences = [self._occupant(slot) for slot in decode_slots.tolist()] + draft.sampled
        slots = np.concatenate([decode_slots, [sequence.slot for sequence in draft.sampled]]).astype(np.int32)
        self.steps.append(Step(self.last_step, slots, sequences, tokens, self._clock()))
        release = self.rows.take_leaving()
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
        cached_tokens=0,
        completion_tokens=sum(len(sequence.output) for sequence in request.sequences),
        queue_time=scheduled - request.arrived,
        prefill_time=first_token - scheduled,
        decode_time=now - first_token,
        preemptions=request.preemptions,
    )
