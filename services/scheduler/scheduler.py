"""The one owner of memory and of every request's state. Knows no socket, no text and no model.

``plan`` makes the next step while the one before still runs, and ``retire`` takes in a step's result. The rule
everything rests on: nothing that a step in flight names is given back before that step is retired. Finishing,
cancelling and preempting only take a sequence out of later plans; ``retire`` reclaims.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter

import numpy as np

from services.scheduler.admission import Admission
from services.scheduler.beams import Beams
from services.scheduler.budget import Budget, Budgets
from services.scheduler.constrained import Constrained
from services.scheduler.decodes import Decodes
from services.scheduler.ends import Ends
from services.scheduler.flight import Flight
from services.scheduler.grammar import Grammar
from services.scheduler.host_pool import HostPool
from services.scheduler.intake import Intake
from services.scheduler.limits import Limits
from services.scheduler.preemption import Preemption
from services.scheduler.prefill import Prefill
from services.scheduler.prefix_cache import Digest, digest
from services.scheduler.queues import Queues
from services.scheduler.request import Request, State
from services.scheduler.rows import Rows, Slots
from services.scheduler.running import Running
from services.scheduler.stats import Load, Stats
from services.scheduler.step_costs import StepCosts
from services.scheduler.steps import Draft, Step
from services.scheduler.streams import Streams
from services.scheduler.swaps import Swaps
from services.scheduler.tables import Tables
from services.scheduler.victims import Victims
from shared.codec import Int32
from shared.errors import QuireError
from shared.ids import client_of
from shared.logprobs import by_entry
from shared.wire import Accept, Logprobs, Mask, Plan, SubmitTokens


class StepError(QuireError):
    """A result that does not belong to the oldest step in flight."""


class Scheduler:
    """Puts the parts together: ``intake`` to ``queues``, ``admission`` to ``running``, and ``ends``."""

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
        self.tables = tables = Tables(limits, digest)
        self.pool = tables.pool
        self.rows = Rows(limits.max_num_seqs)
        self.streams = Streams()
        self.queues = queues = Queues(limits)
        host = HostPool(min(limits.host_blocks, self.pool.num_usable))
        self.flight = flight = Flight(tables, host)
        self.swaps = swaps = Swaps(tables, host, flight)
        self.beams = Beams(tables, flight)
        self.running = running = Running(self.rows, self.beams, queues, flight)
        self.costs = StepCosts()
        self._budgets = Budgets(limits, self.costs)
        self.preemption = Preemption(limits.preemption_mode)
        self.decodes = Decodes(tables, running, flight, stats)
        self.victims = Victims(self.preemption, tables, running, self.decodes, queues, swaps, flight, stats)
        self.prefill = Prefill(limits, tables, running, queues, flight)
        costs = self.preemption.costs
        self.admission = Admission(tables, running, queues, self.prefill, swaps, flight, costs, stats, clock)
        self.intake = Intake(limits, tables, running, queues, self.streams, stats, clock)
        self.ends = Ends(limits, running, queues, swaps, self.streams, stats, clock)
        self.constrained = Constrained(limits, tables, running, self.decodes, flight, self.ends)
        self._clock = clock
        self._full = True  # the next plan has to be a full one

    @property
    def steps(self) -> deque[Step]:
        """Those in flight, the oldest first."""
        return self.flight.steps

    @property
    def last_step(self) -> int:
        """The newest step planned."""
        return self.flight.last_step

    # ---- requests --------------------------------------------------------------------------------------------------

    def submit(self, owner: bytes, message: SubmitTokens, grammar: Grammar | None = None) -> Accept | None:
        """Takes a request in, or re-attaches ``owner`` to it when its rid is known.

        ``grammar``: what ``message.grammar`` asks for, at its beginning.

        None: it was cancelled before it came. Raises RequestError when it cannot be served (400) or the queue is
        full (429; a re-submission with ``generated`` passes that limit).
        """
        request = self.streams.requests.get(message.rid)
        if request is not None:
            self.streams.attach(request, owner, message.generated_counts)
        elif self.intake.is_cancelled(message.rid):
            return None
        else:
            request = self.intake.take(owner, message, grammar)
            for sequence in request.sequences:
                self.stats.delivered(self.constrained.end_if_over(sequence))
                if sequence.output and sequence.finished is None:
                    self.ends.end_if_over(sequence)
        return Accept(message.rid, len(request.prompt))

    def cancel(self, rid: int) -> None:
        """Ends what is left of a request with FINISHED(abort); an unknown rid is remembered. Idempotent."""
        request = self.streams.requests.get(rid)
        if request is None:
            self.intake.cancelled_early(rid)
        else:
            self.ends.end_all([request], "abort")

    def stop(self, rid: int, index: int, keep: int) -> None:
        """The tokenizer ends a sequence after ``keep`` tokens; wins over an end by length or EOS. Idempotent."""
        request = self.streams.requests.get(rid)
        if request is None or not 0 <= index < len(request.sequences) or keep < 0 or request.is_held:
            return
        self.ends.stop(request.sequences[index], keep)

    def drop_owner(self, owner: bytes) -> int:
        """A tokenizer is gone: cancels and forgets its requests. Returns how many were open."""
        ended = self.ends.end_all(self.streams.of_owner(owner), "abort")
        self.streams.forget_owner(owner)
        return ended

    def drop_client(self, client_number: int) -> int:
        """A gateway is gone: cancels its requests. Returns how many were open."""
        requests = [one for one in self.streams.requests.values() if client_of(one.rid) == client_number]
        return self.ends.end_all(requests, "abort")

    def end_all(self, message: str) -> int:
        """Ends every open sequence with FINISHED(error, message). Returns how many requests were open."""
        return self.ends.end_all(self.streams.requests.values(), "error", message=message)

    def expire(self) -> list[int]:
        """Once a second: ends what is too late and forgets old cancels.

        Repeats unacknowledged ends, and gives up the oldest, whose rids it returns.
        """
        now, waiting = self._clock(), self.queues.waiting
        self.ends.end_the_late(now)
        if waiting.shares is not None:
            tenants = {request.tenant for request in self.streams.requests.values()}
            waiting.shares.forget(tenants, waiting.tenants())
        self.intake.forget_cancels(now)
        return self.streams.expire(now)

    @property
    def load(self) -> Load:
        sequences = self.running.sequences()
        return Load(
            running=len(sequences),
            waiting=self.queues.num_waiting,
            preempted=len(self.queues.preempted),
            blocks_used=self.pool.num_used,
            blocks_total=self.pool.num_usable,
            blocks_logical=sum(len(sequence.blocks) for sequence in sequences),
            swapped=sum(bool(sequence.host) for sequence in self.queues.preempted),
            host_blocks_used=self.swaps.host.num_used,
            blocks_cached=self.pool.num_cached,
        )

    # ---- steps -----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None: nothing to do, enough in flight, or memory that only a retire brings back."""
        if self.flight.is_full:
            return None
        for slot in self.rows.complete():
            sequence = self.rows.occupant(slot)
            self.running.vacate(sequence)
            sequence.state = State.DRAIN
        self.pool.now = self._clock()
        secure = self.victims.make_room()
        swapped = self.swaps.ready()
        if not secure and not swapped:
            return None
        draft = Draft()
        runs = self.constrained.leave_for_runs() if secure else []
        draft.pause, draft.resume = self.rows.pause([] if secure else self.decodes.short_of_memory())
        decode_slots = self.rows.decode_slots()
        self.victims.swap_out(draft, swapped)
        decodes, budget = len(decode_slots), None
        if secure:
            self.decodes.append_blocks(draft)
            self.decodes.copy_forked_blocks(draft)
            decodes += self.decodes.plan_beams(draft)
            decodes += self.constrained.plan_runs(draft, runs, self.limits.max_num_batched_tokens - decodes)
            budget = self._budgets.make(decodes, self._prompts())
            self.prefill.go_on(draft, budget)
            self.admission.admit(draft, budget)
        self.rows.forked[decode_slots] = False
        if not len(decode_slots) and draft.is_empty:
            return None
        return self._commit(draft, decode_slots, decodes, budget)

    def mask(self) -> Mask | None:
        """What the oldest step in flight may sample, if anybody does so under a mask; once for each step."""
        step = self.flight.steps[0] if self.flight.steps else None
        if step is None or not step.masked or step.mask_sent:
            return None
        step.mask_sent = True
        slots, bits = self.constrained.mask(step)
        return Mask(step.step_id, self.scheduler_epoch, self.worker_epoch, slots, bits)

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
        steps = self.flight.steps
        if not steps or steps[0].step_id != step_id:
            raise StepError(f"worker rank 0 answered step {step_id}, which is not the oldest in flight")
        if not np.array_equal(slots, steps[0].slots) or len(ids) != len(slots):
            raise StepError(f"worker rank 0 answered other slots than those of step {step_id}")
        step = steps[0]
        now = self.pool.now = self._clock()
        if prompt_logprobs is not None:
            _take_given_logprobs(step, prompt_logprobs)
        delivered = self.constrained.settle(step)
        self._publish(step)
        self.flight.land()
        self.victims.measure(step, timings)
        if "total" in timings and not any(step.moved.values()):
            self.costs.observe(
                timings["total"], decodes=step.decodes, prompt_tokens=step.prompt_tokens, contexts=step.contexts
            )
        searches = self._take_logprobs(step, logprobs) if logprobs is not None else ()
        delivered += self._deliver(step, ids, now)
        self.stats.cache_events(*self.tables.take_counts())
        for request in searches:
            delivered += self.ends.advance_beams(request)
        self.stats.delivered(delivered)
        self.stats.stepped(step.tokens, now)

    def restart(self, worker_epoch: int) -> None:
        """Gives up all steps in flight: the worker keeps no rows, everything is computed again from tokens."""
        self.worker_epoch = worker_epoch
        steps = self.flight.steps
        lost = {sequence for step in steps for sequence in step.sequences if sequence.state is State.DRAIN}
        while steps:
            self.flight.land()
        for sequence in self.running.sequences():
            self.victims.preempt(sequence)
        for sequence in self.queues.preempted:  # what the worker holds for them on the host counts as lost too
            self.swaps.forget(sequence)
        self.tables.clear()
        for sequence in lost:
            self.queues.come_back(sequence)
        self._full = True

    # ---- within ----------------------------------------------------------------------------------------------------

    def _prompts(self) -> int:
        """How many prompts are under way, or could be if they were admitted now."""
        return len(self.queues.prefilling) + min(self.queues.num_waiting, self.running.num_free_rows)

    def _publish(self, step: Step) -> None:
        """Blocks that this step filled may be found by others from now on."""
        if not self.limits.enable_prefix_caching:
            return
        for i in np.flatnonzero(step.lengths % self.limits.block_size == 0).tolist():
            self.tables.publish(step.sequences[i], int(step.lengths[i]))
        for sequence, length, _ in step.chunks:
            self.tables.publish(sequence, length)

    def _deliver(self, step: Step, ids: Int32, now: float) -> int:
        """A step's tokens go into their sequences' outputs and streams; returns how many that are."""
        delivered, shares = 0, self.queues.waiting.shares
        for sequence, token in zip(step.sequences, ids.tolist(), strict=True):
            if sequence.finished is not None:
                continue  # the overrun row of a sequence that ended while this step was in flight
            request, output = sequence.request, sequence.output
            if request.first_token is None:
                request.first_token = now
                self.stats.prompt_computed(len(request.prompt))
                self.stats.prompt_cached(len(request.prompt), request.cached_tokens)
                self.streams.cached(request)
            if request.search is not None:
                continue
            if sequence.grammar is not None:
                delivered += self.constrained.deliver(sequence, token)
                continue
            output.append(token)
            if request.is_plain:  # nearly all: the rest of this loop is all that a token costs then
                request.outbox.token(request.rid, sequence.index, len(output) - 1, token)
            elif not request.is_held:
                self.streams.token(sequence)
            delivered += 1
            if shares is not None:
                shares.serve(request.tenant, output_tokens=1)
            if token in request.stop_ids or len(output) >= request.max_tokens:
                self.ends.end_if_over(sequence)
        return delivered

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
                sequence.learn(found)
        return list(searches)

    def _commit(self, draft: Draft, decode_slots: Slots, decodes: int, budget: Budget | None) -> Plan:
        step_id = self.flight.next_step
        self.rows.length[decode_slots] += 1
        sequences = [self.rows.occupant(slot) for slot in decode_slots.tolist()] + draft.sampled
        slots = np.concatenate([decode_slots, [sequence.slot for sequence in draft.sampled]]).astype(np.int32)
        self.flight.add(
            Step(
                step_id=step_id,
                slots=slots,
                sequences=sequences,
                lengths=self.rows.length[decode_slots],
                chunks=draft.chunks,
                pins=draft.pins,
                decodes=decodes,
                prompt_tokens=budget.prompt_tokens if budget is not None else 0,
                contexts=budget.contexts if budget is not None else 0.0,
                sent=self.pool.now,
                moved={"swap_out": len(draft.swap_out), "swap_in": len(draft.swap_in)},
                efforts=draft.efforts,
                host=draft.host,
                vacated=draft.swapped,
                masked=self.constrained.masked(slots),
            )
        )
        release = self.rows.take_leaving()
        for beam in draft.beams:  # their rows are for this step alone; the next plan releases them
            self.rows.vacate(beam.slot)
            beam.slot = -1
        full, self._full = self._full, False
        return draft.plan(
            step_id,
            self.scheduler_epoch,
            self.worker_epoch,
            full=full,
            decodes=len(decode_slots),
            release=[] if full else release,
        )


def _take_given_logprobs(step: Step, logprobs: Logprobs) -> None:
    """Keeps those of prompts and runs that are new: what is computed again tells them again."""
    for number, found in groupby(by_entry(logprobs), key=itemgetter(0)):
        sequence, end, run = step.chunks[number]
        tokens = [one for _, one in found]
        of_prompt, of_run = tokens[: len(tokens) - len(run)], tokens[len(tokens) - len(run) :]
        request = sequence.request
        first = min(end, len(request.prompt) - 1) - len(of_prompt)  # counted from the second token
        request.prompt_logprobs += of_prompt[len(request.prompt_logprobs) - first :]
        # Siblings that sample from this very prompt, or have come to the same output, go on in the same way.
        for one in request.sequences if run else ():
            if one.finished is None and one.output == sequence.output:
                known = one.num_tokens + len(one.ahead_logprobs)
                one.ahead_logprobs += of_run[known - run.start :] if known in run else []
