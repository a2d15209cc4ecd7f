"""The pure scheduler: memory by hand count, one step ahead, ends, preemption, admission."""

from __future__ import annotations

import pytest

from services.scheduler.intake import MOST_CANCELS
from shared.errors import RequestError
from tests.services.scheduler.simulation import EOS, OWNER, Simulation, toy_output


def tired_seed(prompt: list[int], at_most: int) -> tuple[int, list[int]]:
    """A seed with which the toy model ends ``prompt`` by an EOS after two to ``at_most`` tokens."""
    for seed in range(1000):
        output = toy_output(prompt, at_most, 2.0, seed)
        if output[-1] == EOS and len(output) > 2:
            return seed, output
    raise AssertionError("no such seed")


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (6, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_prompt_holds_the_blocks_its_tokens_need(tokens: int, blocks: int) -> None:
    simulation = Simulation()
    simulation.submit(1, [5] * tokens, 4)
    simulation.plan()
    assert simulation.blocks_of(1) == blocks
    assert simulation.scheduler.pool.num_used == blocks


def test_four_requests_hold_13_blocks_where_reserving_takes_512() -> None:
    simulation = Simulation(num_blocks=600, max_num_batched_tokens=256)
    lengths = (6, 50, 8, 100)
    for rid, length in enumerate(lengths, 1):
        simulation.submit(rid, [rid] * length, 4)
    simulation.plan()
    used = simulation.scheduler.pool.num_used
    assert used == 13
    assert used * 16 - sum(lengths) == 44
    reserved = 4 * (2048 // 16)
    assert reserved == 4 * 128


def test_a_sequence_gets_its_next_block_only_when_a_token_needs_it() -> None:
    simulation = Simulation()
    simulation.submit(1, [5] * 15, 8)
    held = []
    for _ in range(4):
        simulation.plan()
        held.append(simulation.blocks_of(1))
        simulation.execute()
        simulation.retire()
    assert held == [1, 1, 2, 2]  # 15 in the prompt's step, then 16, 17, 18


def test_memory_is_back_after_the_retire_of_the_last_step_that_names_it() -> None:
    prompt = [7] * 5
    seed, output = tired_seed(prompt, 12)
    simulation = Simulation()
    simulation.submit(1, prompt, 100, temperature=2.0, seed=seed)
    while (1, 0) not in simulation.finished:
        simulation.plan()
        simulation.plan()
        simulation.execute()
        simulation.retire()
        simulation.receive()
    assert len(simulation.scheduler.steps) == 1  # the overrun step still runs, and names the blocks
    assert simulation.scheduler.pool.num_used == 1
    simulation.execute()
    simulation.retire()
    assert simulation.scheduler.pool.num_used == 0
    assert simulation.outputs[1, 0] == output


# ---- one step ahead ------------------------------------------------------------------------------------------------


def test_two_plans_are_in_flight_and_no_third() -> None:
    simulation = Simulation()
    simulation.submit(1, [5] * 5, 50)
    assert simulation.plan() is not None
    assert simulation.plan() is not None
    assert simulation.plan() is None
    simulation.execute()
    simulation.retire()
    assert simulation.plan() is not None


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_max_tokens_ends_exactly_without_an_overrun_row(max_tokens: int) -> None:
    simulation = Simulation()
    simulation.submit(1, [5] * 5, max_tokens)
    simulation.drain()
    assert simulation.outputs[1, 0] == toy_output([5] * 5, max_tokens)
    assert simulation.finished[1, 0].reason == "length"
    assert sum(plan.decodes for plan in simulation.plans) == max_tokens - 1
    simulation.check_nothing_is_left()


def test_an_eos_costs_one_overrun_row_that_nobody_sees() -> None:
    prompt = [7] * 5
    seed, output = tired_seed(prompt, 12)
    simulation = Simulation()
    simulation.submit(1, prompt, 100, temperature=2.0, seed=seed)
    simulation.drain()
    assert simulation.outputs[1, 0] == output
    finished = simulation.finished[1, 0]
    assert (finished.reason, finished.stop_reason, finished.tokens) == ("stop", "", len(output))
    assert simulation.done[1].completion_tokens == len(output)
    assert sum(plan.decodes for plan in simulation.plans) == len(output)  # one more than its tokens need


def test_ignore_eos_goes_on_and_a_stop_token_id_ends() -> None:
    prompt = [7] * 5
    seed, output = tired_seed(prompt, 12)
    simulation = Simulation()
    simulation.submit(1, prompt, len(output) + 3, temperature=2.0, seed=seed, ignore_eos=True)
    stop = output[1]
    simulation.submit(2, prompt, 100, temperature=2.0, seed=seed, stop_token_ids=[stop])
    simulation.drain()
    assert simulation.finished[1, 0].reason == "length"
    assert simulation.finished[1, 0].tokens == len(output) + 3
    assert (simulation.finished[2, 0].reason, simulation.finished[2, 0].stop_reason) == ("stop", str(stop))
    assert simulation.outputs[2, 0] == output[: output.index(stop) + 1]


def test_the_whole_context_can_be_used_and_not_more() -> None:
    """A prompt beyond the pool is refused at once with the limit, block 0 counted out (vLLM 35541, ollama 4967)."""
    simulation = Simulation(num_blocks=5, max_num_batched_tokens=100)
    assert simulation.limits.max_model_len == 64  # what four blocks hold, below the model's 2048
    simulation.submit(1, [5] * 60, 4)
    simulation.drain()
    assert simulation.finished[1, 0].tokens == 4
    with pytest.raises(RequestError, match=r"64 tokens.*requested 65 tokens \(60 in the prompt, 5 in the") as error:
        simulation.submit(2, [5] * 60, 5)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")


def test_chunks_never_exceed_the_budget_and_decodes_never_pause() -> None:
    """A long prefill does not stop streams (vLLM 10774)."""
    simulation = Simulation(max_num_batched_tokens=16)
    simulation.submit(1, [5] * 4, 30)
    simulation.round()
    simulation.submit(2, [6] * 100, 3)
    simulation.drain()
    spans = [sum(plan.chunk_lens) + plan.decodes for plan in simulation.plans]
    assert max(spans) == 16
    first = [index for index, plan in enumerate(simulation.plans) if plan.decodes]
    assert first[:29] == list(range(1, 30))  # the first request decodes in every plan from its second on
    assert simulation.outputs[2, 0] == toy_output([6] * 100, 3)


def test_a_lost_plan_starts_over_without_losing_a_token() -> None:
    simulation = Simulation()
    simulation.submit(1, [5] * 20, 12)
    simulation.submit(2, [6] * 3, 12)
    for _ in range(4):
        simulation.round()
    simulation.restart()
    plan = simulation.plan()
    assert plan is not None
    assert plan.full
    assert plan.worker_epoch == 3
    simulation.drain()
    assert simulation.outputs == {(1, 0): toy_output([5] * 20, 12), (2, 0): toy_output([6] * 3, 12)}
    simulation.check_nothing_is_left()


# ---- continuous batching -------------------------------------------------------------------------------------------


def test_a_place_is_refilled_in_the_very_next_plan() -> None:
    simulation = Simulation(max_num_seqs=3)
    for rid, tokens in enumerate((5, 50, 3, 4, 6, 2), 1):
        simulation.submit(rid, [rid] * 4, tokens)
    simulation.drain()
    entered = [plan.step_id for plan in simulation.plans for _ in plan.new_rows]
    # A, B, C at once; D after C's 3 steps, E after A's 5, F after D's 4.
    assert entered == [1, 1, 1, 4, 6, 8]
    assert all(plan.decodes >= 1 for plan in simulation.plans[1:50])
    assert len(simulation.plans) == 50  # the 50-token request never paused


# ---- preemption ----------------------------------------------------------------------------------------------------


def test_a_pool_too_small_preempts_and_gives_the_same_tokens() -> None:
    """Victims leave the very plan in which room is made, and nobody is skipped (vLLM 23347, 49097)."""
    requests = {rid: ([rid] * (5 + rid), 40) for rid in range(1, 7)}
    simulation = Simulation(num_blocks=9)
    for rid, (prompt, max_tokens) in requests.items():
        simulation.submit(rid, prompt, max_tokens)
    simulation.drain()
    assert sum(done.preemptions for done in simulation.done.values()) > 0
    assert simulation.done[1].preemptions == 0  # the oldest keeps its memory
    for rid, (prompt, max_tokens) in requests.items():
        assert simulation.outputs[rid, 0] == toy_output(prompt, max_tokens)
        assert simulation.finished[rid, 0].tokens == max_tokens
    simulation.check_nothing_is_left()


def test_the_victim_is_the_newest_of_the_lowest_priority_and_returns_before_newcomers() -> None:
    simulation = Simulation(scheduling_policy="priority", num_blocks=5, max_num_seqs=3)
    simulation.submit(1, [1] * 14, 30, priority=1)
    simulation.plan()  # it runs before the others come
    simulation.submit(2, [2] * 14, 10, priority=0)
    simulation.submit(3, [3] * 14, 10, priority=0)
    simulation.submit(4, [4] * 2, 2, priority=0)
    simulation.drain()
    assert simulation.done[1].preemptions > 0
    assert simulation.done[2].preemptions == simulation.done[3].preemptions == 0
    assert simulation.outputs[1, 0] == toy_output([1] * 14, 30)
    assert list(simulation.done).index(4) > list(simulation.done).index(2)


def test_a_token_in_flight_at_preemption_is_kept() -> None:
    """Preempted while a later step is in flight: nothing is reused early or applied late (vLLM PR 49620)."""
    simulation = Simulation(num_blocks=4, block_size=4, max_num_seqs=2)
    simulation.submit(1, [1] * 3, 9)
    simulation.submit(2, [2] * 3, 9)
    while not simulation.scheduler.queues.preempted:
        simulation.round()
    known = len(simulation.outputs.get((2, 0), []))
    simulation.drain()
    assert known < 9
    assert simulation.outputs == {(1, 0): toy_output([1] * 3, 9), (2, 0): toy_output([2] * 3, 9)}
    total = sum(plan.decodes + sum(map(bool, plan.chunk_samples)) for plan in simulation.plans)
    assert total == 18  # every sampled token was delivered: none was thrown away and sampled again


def test_a_preempted_sequence_returns_only_with_its_token_in_flight() -> None:
    simulation = Simulation()
    simulation.submit(1, [1] * 5, 9)
    simulation.round()
    simulation.plan()
    (sequence,) = simulation.scheduler.rows.occupants()
    simulation.scheduler.victims.preempt(sequence)  # there is memory enough, so only the token holds it back
    simulation.check()
    assert simulation.plan() is None
    simulation.drain()
    assert simulation.outputs[1, 0] == toy_output([1] * 5, 9)
    simulation.check_nothing_is_left()


# ---- admission -----------------------------------------------------------------------------------------------------


def test_only_whole_prompts_are_admitted() -> None:
    """Two prompts that each need more than half of the pool do not hold half each for ever (vLLM PR 40968, 21809)."""
    simulation = Simulation(num_blocks=11, max_num_batched_tokens=16)
    simulation.submit(1, [1] * 120, 3)
    simulation.submit(2, [2] * 120, 3)
    simulation.round()
    assert simulation.scheduler.load.running == 1
    simulation.drain()
    assert simulation.outputs[2, 0] == toy_output([2] * 120, 3)
    assert simulation.done[1].preemptions == simulation.done[2].preemptions == 0


def test_a_full_queue_is_429_with_the_time_the_queue_takes() -> None:
    simulation = Simulation(max_num_seqs=1, max_num_queued_reqs=2)
    for rid in range(1, 4):
        simulation.submit(rid, [5] * 10, 10)
    with pytest.raises(RequestError, match="max_num_queued_reqs is 2") as error:
        simulation.submit(4, [5] * 10, 10)
    assert error.value.status == 429
    assert error.value.retry_after is not None
    assert error.value.retry_after >= 1
    simulation.submit(5, [5] * 10, 10, generated=[toy_output([5] * 10, 3)])  # a re-submission passes
    simulation.drain()
    assert set(simulation.done) == {1, 2, 3, 5}


def test_retry_after_is_queued_tokens_over_the_measured_rate() -> None:
    simulation = Simulation(max_num_seqs=1, max_num_queued_reqs=2, max_num_batched_tokens=64)
    simulation.submit(1, [5] * 10, 90)
    while simulation.scheduler.load.running or simulation.scheduler.load.waiting:
        simulation.round()
        simulation.now += 0.1  # ten tokens a second, about
    for rid in range(2, 5):
        simulation.submit(rid, [5] * 20, 90)
    with pytest.raises(RequestError) as error:
        simulation.submit(5, [5] * 10, 90)
    # Three requests wait (none was planned yet), each of 20 prompt tokens and probably 90 more, at ten a second.
    assert error.value.retry_after == pytest.approx((3 * 20 + 3 * 90) / 10, rel=0.1)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "no tokens"),
        ([1, 64], {}, "token id 64 is outside the vocabulary of 64"),
        ([1, -1], {}, "token id -1 is outside"),
        ([1], {"n": 0}, "n is 0, outside 1..8"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"seed": -1}, "seed is -1"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt: list[int], fields: dict[str, object], message: str) -> None:
    simulation = Simulation()
    with pytest.raises(RequestError, match=message) as error:
        simulation.submit(1, prompt, 5, **fields)
    assert error.value.status == 400
    simulation.check_nothing_is_left()


# ---- ends ----------------------------------------------------------------------------------------------------------


def states() -> dict[str, Simulation]:
    """Request 1 in every state it can be cancelled in."""
    made = {name: Simulation(max_num_batched_tokens=16) for name in ("waiting", "prefill", "decode", "drain", "done")}
    for simulation in made.values():
        simulation.submit(1, [1] * 30, 6)
    made["prefill"].plan()
    for _ in range(4):
        made["decode"].round()
    while made["drain"].scheduler.streams.requests[1].sequences[0].state.value != "drain":
        made["drain"].round()
        made["drain"].plan()
    made["done"].drain_without_receiving()
    preempted = Simulation(num_blocks=4, block_size=4, max_num_seqs=2)
    preempted.submit(2, [2] * 3, 9)
    preempted.submit(1, [1] * 3, 9)
    while not preempted.scheduler.queues.preempted:
        preempted.round()
    return {**made, "preempted": preempted}


@pytest.mark.parametrize("name", ["waiting", "prefill", "decode", "drain", "done", "preempted"])
def test_cancel_in_every_state(name: str) -> None:
    simulation = states()[name]
    sequence = simulation.scheduler.streams.requests[1].sequences[0]
    assert sequence.state.value == ("finished" if name == "done" else name)
    simulation.scheduler.cancel(1)
    simulation.scheduler.cancel(1)
    simulation.check()
    assert sequence.slot == -1
    simulation.drain()
    assert simulation.finished[1, 0].reason == ("length" if name == "done" else "abort")
    assert simulation.done[1].completion_tokens == simulation.finished[1, 0].tokens
    simulation.check_nothing_is_left()


def test_a_cancel_before_its_submit_is_remembered_for_ten_seconds() -> None:
    simulation = Simulation()
    simulation.scheduler.cancel(1)
    simulation.scheduler.cancel(2)
    assert simulation.submit(1, [1], 5) is None
    assert simulation.submit(1, [1], 5) is None  # a SUBMIT may be sent again until it is answered
    simulation.now += 11
    simulation.scheduler.expire()
    assert simulation.submit(2, [1], 5) is not None


def test_of_early_cancels_the_newest_are_remembered() -> None:
    simulation = Simulation()
    for rid in range(MOST_CANCELS + 1):
        simulation.scheduler.cancel(rid)
    assert simulation.submit(0, [1], 5) is not None
    assert simulation.submit(1, [1], 5) is None
    assert simulation.submit(MOST_CANCELS, [1], 5) is None


def test_stop_keeps_what_the_tokenizer_says_and_usage_counts_that() -> None:
    simulation = Simulation()
    simulation.submit(1, [1] * 5, 50)
    for _ in range(10):
        simulation.round()
    simulation.receive()
    assert len(simulation.outputs[1, 0]) == 10
    simulation.scheduler.stop(1, 0, 7)
    simulation.drain()
    assert (simulation.finished[1, 0].reason, simulation.finished[1, 0].tokens) == ("stop", 7)
    assert simulation.done[1].completion_tokens == 7
    simulation.submit(2, [1] * 5, 20)
    simulation.drain()
    counted = simulation.scheduler.stats.registry.snapshot()["vllm:generation_tokens"][3][0][1]
    assert counted == 7 + 20
    simulation.check_nothing_is_left()


def test_stop_wins_over_a_crossing_end_by_length() -> None:
    simulation = Simulation()
    simulation.submit(1, [1] * 5, 6)
    simulation.drain_without_receiving()
    simulation.scheduler.stop(1, 0, 4)
    simulation.receive(acknowledge=False)
    assert (simulation.finished[1, 0].reason, simulation.finished[1, 0].tokens) == ("stop", 4)
    assert simulation.done[1].completion_tokens == 4
    simulation.scheduler.stop(1, 0, 4)
    simulation.receive()
    simulation.check_nothing_is_left()


# ---- streams -------------------------------------------------------------------------------------------------------


def test_resume_sends_everything_from_an_offset_with_the_ends() -> None:
    simulation = Simulation()
    simulation.submit(1, [1] * 5, 8)
    simulation.drain_without_receiving()
    (outbox,) = simulation.scheduler.streams.ready()
    outbox.take(0)  # lost on the way
    simulation.scheduler.streams.resume(OWNER, 1, 0, 3)
    message = outbox.take(0)
    assert (message.rids, message.offsets, message.counts) == ([1], [3], [5])
    assert message.ids.tolist() == toy_output([1] * 5, 8)[3:]
    assert [finished.tokens for finished in message.finished] == [8]
    assert [done.rid for done in message.done] == [1]


def test_resume_of_an_unknown_request_ends_it() -> None:
    simulation = Simulation()
    simulation.scheduler.streams.resume(OWNER, 9, 0, 5)
    simulation.receive()
    finished = simulation.finished[9, 0]
    assert (finished.reason, finished.tokens) == ("error", 5)
    assert "does not know this request" in finished.message
    assert simulation.done[9].completion_tokens == 5


def test_a_second_submit_attaches_and_never_runs_twice() -> None:
    simulation = Simulation()
    simulation.submit(1, [1] * 5, 8)
    for _ in range(4):
        simulation.round()
    simulation.submit(1, [1] * 5, 8, owner=b"tokenizer:1:0123456789abcdef")
    assert len(simulation.scheduler.streams.requests) == 1
    simulation.outputs.clear()
    first, second = simulation.scheduler.streams.ready()
    assert (first.owner, second.owner) == (OWNER, b"tokenizer:1:0123456789abcdef")
    first.take(0)
    simulation.drain()
    assert simulation.outputs[1, 0] == toy_output([1] * 5, 8)


def test_generated_tokens_are_continued() -> None:
    whole = toy_output([1] * 5, 12)
    simulation = Simulation()
    simulation.submit(1, [1] * 5, 12, generated=[whole[:5]])
    simulation.submit(2, [1] * 5, 12, generated=[whole])
    simulation.drain()
    assert simulation.outputs[1, 0] == whole
    assert simulation.finished[2, 0].tokens == 12
    assert sum(plan.decodes for plan in simulation.plans) == 12 - 5 - 1
    with pytest.raises(RequestError, match="do not cut 3 ids"):
        simulation.scheduler.submit(OWNER, simulation.message(3, [1], 12, generated=whole[:3], counts=[2]))


def test_an_unacknowledged_end_is_sent_again_and_given_up_after_a_minute() -> None:
    simulation = Simulation()
    simulation.submit(1, [1] * 5, 3)
    simulation.drain_without_receiving()
    simulation.receive(acknowledge=False)
    simulation.done.clear()
    simulation.now += 3
    assert simulation.scheduler.expire() == []
    simulation.receive(acknowledge=False)
    assert list(simulation.done) == [1]
    simulation.now += 60
    assert simulation.scheduler.expire() == [1]
    simulation.check_nothing_is_left()


def test_a_lost_tokenizer_and_a_lost_gateway_take_their_requests_with_them() -> None:
    simulation = Simulation()
    other = b"tokenizer:1:0123456789abcdef"
    simulation.submit(7 << 48 | 1, [1] * 5, 50)
    simulation.submit(7 << 48 | 2, [1] * 5, 50, owner=other)
    simulation.submit(8 << 48 | 1, [1] * 5, 5)
    simulation.round()
    assert simulation.scheduler.drop_owner(other) == 1
    assert simulation.scheduler.drop_client(7) == 1
    simulation.drain()
    assert simulation.finished[7 << 48 | 1, 0].reason == "abort"
    assert simulation.finished[8 << 48 | 1, 0].reason == "length"
    simulation.check_nothing_is_left()


def test_end_all_gives_every_open_sequence_one_error() -> None:
    simulation = Simulation(max_num_seqs=2)
    for rid in range(1, 5):
        simulation.submit(rid, [1] * 5, 9)
    simulation.round()
    assert simulation.scheduler.end_all("the roof fell in") == 4
    simulation.receive()
    assert {f.reason for f in simulation.finished.values()} == {"error"}
    assert {f.message for f in simulation.finished.values()} == {"the roof fell in"}
    assert set(simulation.done) == {1, 2, 3, 4}


def test_sequences_of_a_group_sample_with_seeds_in_order() -> None:
    simulation = Simulation()
    simulation.submit(1, [1] * 5, 9, n=3, temperature=1.0, seed=40)
    simulation.drain()
    for index in range(3):
        assert simulation.outputs[1, index] == toy_output([1] * 5, 9, 1.0, 40 + index)
    assert simulation.done[1].completion_tokens == 27
