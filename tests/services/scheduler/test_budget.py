"""Prompts beside running streams: how long steps get, who gets what of them, and that all goes on.

The worker's time is made up, so that every figure can be counted by hand: 10 ms for decodes however many there are,
1 ms for a prompt's token and 100 ns more for every token before it.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.budget import LEAST, STRETCH, TOGETHER, Budget
from shared.wire import Plan
from tests.services.scheduler.simulation import VOCAB, Simulation, toy_output
from tests.services.scheduler.test_step_costs import taught

DECODES, TOKEN, CONTEXT = 0.010, 0.001, 1e-7


def chunk_seconds(start: int, count: int) -> float:
    return sum(TOKEN + CONTEXT * position for position in range(start, start + count))


def seconds(plan: Plan) -> float:
    chunks = zip(plan.chunk_starts, plan.chunk_lens, strict=True)
    return (DECODES if plan.decodes else 0.0) + sum(chunk_seconds(*one) for one in chunks)


def timed(
    max_step: float | None = None, *, num_blocks: int = 1200, max_model_len: int = 8192, max_num_seqs: int = 64
) -> Simulation:
    """A simulation on that worker, which knows its costs: it has run a prompt and decodes."""
    simulation = Simulation(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=max_model_len,
        max_step=max_step,
    )

    def timings(plan: Plan) -> dict[str, float]:
        simulation.now += seconds(plan)
        return {"forward": seconds(plan), "total": seconds(plan)}

    simulation.timings = timings
    for length in (20, 600):
        simulation.submit(10_000 + length, [1] * length, 4, temperature=1.0, seed=length)
        simulation.drain()
    simulation.plans.clear()
    return simulation


def streams(simulation: Simulation, count: int = 16, max_tokens: int = 500) -> None:
    for rid in range(1, count + 1):
        simulation.submit(rid, prompt(rid, 16), max_tokens)
    while len(simulation.scheduler.rows.decode_slots()) < count:
        simulation.round()
    simulation.round()
    simulation.plans.clear()


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def test_a_long_prompt_stretches_the_steps_of_16_streams_by_three_quarters_at_most() -> None:
    """A long prompt stops no stream (vllm #10774, #57413)."""
    simulation = timed()
    streams(simulation)
    began = simulation.now
    simulation.submit(100, prompt(100, 4096), 2)
    while (100, 0) not in simulation.outputs:
        simulation.round()
        simulation.receive()
    chunked = [plan for plan in simulation.plans if plan.chunk_lens]
    assert all(plan.decodes == 16 for plan in chunked)
    longest = max(map(seconds, chunked))
    assert longest <= DECODES * (1 + STRETCH) * 1.1 or max(len(plan.tokens) for plan in chunked) == 16
    assert max(len(plan.tokens) for plan in chunked) == 16  # 7.5 ms are 7 tokens: less than the block that must go on
    # 256 steps with a block each, from the context of 0 to that of 4,080.
    assert len(chunked) == 256
    assert simulation.now - began < 256 * DECODES + chunk_seconds(0, 4096) + 4 * DECODES
    assert simulation.outputs[100, 0][:1] == toy_output(prompt(100, 4096), 1)


@pytest.mark.parametrize(("limit", "tokens"), [(0.060, 48), (0.030, 16), (0.005, 16), (0.0, 2032)])
def test_max_step_is_kept_whatever_the_streams_pace(limit: float, tokens: int) -> None:
    """60 ms leave 50 for prompts: 3 blocks of 16 ms; 30 leave 20: one; less than a block is a block; 0 is no limit."""
    simulation = timed(max_step=limit)
    streams(simulation)
    simulation.submit(100, prompt(100, 4096), 2)
    simulation.round()
    simulation.round()
    simulation.round()
    chunks = [plan.chunk_lens for plan in simulation.plans if plan.chunk_lens]
    assert chunks[:3] == [[tokens]] * 3 if limit else chunks == [[tokens], [tokens], [32]]


@pytest.mark.parametrize(
    ("limit", "start", "tokens"),
    [
        (0.020, 0, 16),
        (0.020, 2000, 16),
        (0.020, 4000, 14),
        (0.020, 8000, 11),
        (0.020, 40_000, LEAST),
        (0.010, 4000, 16),
    ],
)
def test_a_block_that_only_its_context_makes_too_long_is_cut(limit: float, start: int, tokens: int) -> None:
    """A block's products take 16 ms, and its attention 1.6 for every 1,000 tokens before it."""
    budget = Budget(taught((DECODES, 0.0), (TOKEN, CONTEXT)), 16, 2048, limit, 1)
    assert budget.chunk(start, 4000) == tokens


def test_a_short_prompt_gets_through_beside_a_long_one() -> None:
    """vllm #57413: short prompts waited for the whole of a long one."""
    simulation = timed(max_step=0.075)
    streams(simulation)
    simulation.submit(100, prompt(100, 4096), 2)
    simulation.round()
    simulation.submit(101, prompt(101, 40), 2)
    for _ in range(6):
        simulation.round()
    simulation.receive()
    assert simulation.outputs[101, 0] == toy_output(prompt(101, 40), 2)
    assert (100, 0) not in simulation.outputs
    # While both are there each has half of the 65 ms, in whole blocks.
    assert [32, 32] in [plan.chunk_lens for plan in simulation.plans]


def test_many_prompts_that_come_together_are_not_held_back_by_a_few_streams() -> None:
    """What the batch lacks is their tokens: nearly all of the time goes to them, 500 ms of each step."""
    simulation = timed()
    streams(simulation, 2)
    began = simulation.now
    for rid in range(100, 132):
        simulation.submit(rid, prompt(rid, 128), 600)
    while len(simulation.scheduler.rows.decode_slots()) < 34:
        simulation.round()
    took = simulation.now - began
    assert took < 1.25 * 32 * chunk_seconds(0, 128)
    assert max(map(seconds, simulation.plans)) <= 1.02 * (TOGETHER + DECODES)


def test_with_nobody_decoding_a_prompt_is_computed_in_large_chunks_but_not_in_one() -> None:
    simulation = timed()
    simulation.submit(1, prompt(1, 4096), 2)
    simulation.drain()
    chunks = [length for plan in simulation.plans for length in plan.chunk_lens]
    assert max(chunks) <= TOGETHER / TOKEN
    assert len(chunks) < 32


def test_chunks_cut_by_time_end_with_a_block() -> None:
    simulation = timed(max_step=0.045)
    streams(simulation)
    simulation.submit(100, prompt(100, 32), 2)
    simulation.drain()
    simulation.plans.clear()
    simulation.submit(101, prompt(100, 32)[:20] + prompt(101, 300), 2)  # 16 tokens are cached, and 4 by copy
    simulation.drain()
    starts = [start for plan in simulation.plans for start in plan.chunk_starts]
    assert starts[0] == 20
    assert all(start % 16 == 0 for start in starts[1:])


def test_two_prompts_under_way_never_hold_half_of_the_pool_each() -> None:
    """vllm #21809: who is let in finds the blocks of those under way taken, although they are still free."""
    simulation = timed(num_blocks=41, max_step=0.020, max_model_len=640)
    simulation.submit(1, prompt(1, 16), 200)
    simulation.round()
    for rid in (2, 3):  # 25 blocks each, of 40
        simulation.submit(rid, prompt(rid, 400), 4)
    while (2, 0) not in simulation.outputs:
        simulation.round()
        simulation.receive()
        assert 3 not in [sequence.request.rid for sequence in simulation.scheduler.queues.prefilling]
    simulation.drain()
    assert all(simulation.outputs[rid, 0] == toy_output(prompt(rid, 400), 4) for rid in (2, 3))
    assert sum(done.preemptions for done in simulation.done.values()) == 0
    simulation.check_nothing_is_left()


def test_who_shares_a_long_prompt_waits_as_long_as_it_grows_and_computes_none_of_it() -> None:
    """With a block a step, 5,000 tokens are under way for longer than anybody waits for one block."""
    simulation = timed(max_step=0.020)
    streams(simulation, 2)
    for rid in (100, 101):
        simulation.submit(rid, prompt(100, 5000), 3)
    while len(simulation.done) < 4:  # the two that taught it the costs are among them
        simulation.round()
        simulation.receive()
    assert sum(len(plan.tokens) for plan in simulation.plans) <= 5000 + 16
    assert simulation.done[101].cached_tokens >= 4992
    assert simulation.outputs[101, 0] == simulation.outputs[100, 0] == toy_output(prompt(100, 5000), 3)


def test_prompts_that_are_cached_far_do_not_take_slots_without_being_computed() -> None:
    """A block after 4,000 cached tokens takes longer than one at the start, for which there would be time."""
    simulation = timed(max_step=0.052)
    streams(simulation, 2)
    simulation.submit(100, prompt(100, 4000), 2)
    while 100 not in simulation.done:
        simulation.round()
        simulation.receive()
    for rid in range(
        101, 111
    ):  # of 42 ms one block takes 22.4: too little is left for another, but not for a first one
        simulation.submit(rid, prompt(100, 4000) + prompt(rid, 100), 2)
    most = 0
    while len(simulation.done) < 13:
        simulation.round()
        simulation.receive()
        most = max(most, len(simulation.scheduler.queues.prefilling))
    assert most <= 2


@given(
    st.floats(1e-5, 1e-3),
    st.floats(0, 1e-6),
    st.floats(-0.01, 0.5),
    st.integers(1, 2048),
    st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 5000)), min_size=1, max_size=12),
)
def test_a_budget_is_kept_and_its_first_chunk_is_a_block_where_products_have_time_for_one(
    token: float, context: float, seconds: float, tokens: int, prompts: list[tuple[int, int]]
) -> None:
    costs = taught((0.01, 0.0), (token, context))
    budget, left, chunks = Budget(costs, 16, tokens, seconds, len(prompts)), seconds, 0
    for start, wanted in prompts:
        if budget.is_spent:
            break
        count = budget.chunk(start, wanted)
        assert 0 <= count <= min(wanted, budget.tokens)
        if count == 0:
            assert chunks
            continue
        took, block = costs.prompt(start, count), min(wanted, 16 - start % 16)
        cut = costs.prompt(start, block) > seconds >= costs.prompt(0, block)
        assert count in (wanted, budget.tokens) or (start + count) % 16 == 0 or (cut and chunks == 0)
        if chunks == 0:
            assert count >= min(block, budget.tokens, LEAST if cut else 16)
            assert took <= seconds * (1 + 1e-9) or count <= (LEAST if cut else 16)
        elif wanted > 1:
            assert took <= left * (1 + 1e-9)
        budget.spend(start, count)
        left, chunks = left - took, chunks + 1
    assert chunks
    assert budget.prompt_tokens <= tokens


def test_rows_for_the_samples_of_a_prompt_under_way_are_kept_free() -> None:
    """Four samples of a long prompt get their rows when it is complete, whoever came in the meantime."""
    simulation = timed(max_step=0.075, max_num_seqs=6)
    streams(simulation, 1)
    simulation.submit(100, prompt(100, 400), 3, n=4, temperature=1.0, seed=5)
    for rid in range(101, 104):
        simulation.submit(rid, prompt(rid, 40), 30)
    for _ in range(4):
        simulation.round()
    assert simulation.scheduler.rows.num_free == 3  # the stream, the long prompt and one of the short ones run
    while 100 not in simulation.done:
        simulation.round()
        simulation.receive()
    for index in range(4):
        assert simulation.outputs[100, index] == toy_output(prompt(100, 400), 3, 1.0, 5 + index)
