"""Beam search and best_of: against a search written straight down, with tables shared and memory scarce."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.beam_search import BeamSearch, Output
from services.scheduler.plan_log import PlanLog
from shared.errors import RequestError
from tests.services.scheduler.simulation import EOS, VOCAB, Simulation, toy_candidates, toy_output


def toy_beams(prompt: list[int], width: int, most: int, penalty: float = 1.0, early: str = "false") -> list[list[int]]:
    """The best ``width`` hypotheses, keeping whole token lists and knowing no tables."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        grown = sorted(
            (
                (score + logprob, [*output, token])
                for score, output in beams
                for token, logprob in toy_candidates(prompt + output, VOCAB - 1)
            ),
            key=lambda one: -one[0],
        )
        ends = [one for one in grown[:width] if one[1][-1] == EOS or length == most]
        ended = sorted(ended + [(s / length**penalty, o) for s, o in ends], key=lambda one: -one[0])[:width]
        beams = [one for one in grown if one[1][-1] != EOS][:width]
        if len(ended) == width:
            at = most if early == "never" and penalty > 0 else length
            if early == "true" or beams[0][0] / at**penalty <= ended[-1][0]:
                break
    return [output for _, output in ended]


def answers(simulation: Simulation, rid: int, n: int) -> list[list[int]]:
    return [simulation.outputs[rid, index] for index in range(n)]


@pytest.mark.parametrize("early", ["false", "true", "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_beams_give_the_hypotheses_of_a_plain_search(penalty: float, early: str) -> None:
    ends = set()
    for seed in range(12):
        rng = random.Random(seed)
        simulation = Simulation(num_blocks=100, block_size=4)
        prompt, width, most = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], rng.randint(1, 5), 14
        options: dict[str, Any] = {"use_beam_search": True, "length_penalty": penalty, "early_stopping": early}
        simulation.submit(1, prompt, most, n=width, **options)
        simulation.drain()
        assert answers(simulation, 1, width) == toy_beams(prompt, width, most, penalty, early)
        ends |= {finished.reason for finished in simulation.finished.values()}
        simulation.check_nothing_is_left()
    assert ends == {"stop", "length"}


def test_nothing_is_told_before_the_end_and_then_everything() -> None:
    simulation = Simulation(num_blocks=100, block_size=4)
    simulation.submit(1, [5] * 6, 10, n=3, use_beam_search=True)
    for _ in range(4):
        simulation.round()
        simulation.scheduler.streams.resume(b"somebody", 1, 0, 0)
        simulation.receive(acknowledge=False)
    assert not simulation.outputs
    simulation.drain()
    assert simulation.done[1].completion_tokens == sum(map(len, answers(simulation, 1, 3)))


def test_beams_share_the_prompt_and_copy_at_most_one_block_per_fork_and_step() -> None:
    """Only the block that a fork writes to is its own; physical over logical blocks is far below one."""
    simulation = Simulation(num_blocks=200, block_size=4, max_num_batched_tokens=128)
    simulation.submit(1, [5] * 41, 20, n=4, use_beam_search=True)
    request = simulation.scheduler.streams.requests[1]
    shares = []
    while 1 not in simulation.done:
        before = [id(beam) for beam in request.beams]
        plans = len(simulation.plans)
        simulation.round()
        for plan in simulation.plans[plans:]:
            assert len(plan.copies) // 2 <= 4
        tables = [beam.blocks for beam in request.beams if beam.blocks]
        if len(tables) == 4:
            shares.append(len({block for table in tables for block in table}) / sum(map(len, tables)))
        simulation.receive(acknowledge=False)
        assert len(before) in (1, 4)
    assert max(shares) < 0.6
    load = simulation.scheduler.load
    assert (load.blocks_used, load.running) == (0, 0)


def test_only_beams_wait_for_their_result() -> None:
    simulation = Simulation(num_blocks=100)
    simulation.submit(1, [5] * 6, 30, n=2, use_beam_search=True)
    simulation.submit(2, [6] * 6, 30)
    for _ in range(4):
        simulation.round()
    decodes = [plan.decodes for plan in simulation.plans[2:]]
    assert decodes == [1] * len(decodes)  # the other request is in every plan
    chunks = [len(plan.chunk_slots) for plan in simulation.plans[1:]]
    assert 0 in chunks  # and the beams only in those after a result
    assert 2 in chunks
    simulation.drain()
    assert simulation.outputs[2, 0] == toy_output([6] * 6, 30)
    assert answers(simulation, 1, 2) == toy_beams([5] * 6, 2, 30)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_under_memory_pressure_give_what_they_give_alone(mode: str, caching: bool) -> None:
    simulation = Simulation(
        num_blocks=33,
        block_size=4,
        max_num_seqs=12,
        host_blocks=32,
        preemption_mode=mode,
        enable_prefix_caching=caching,
    )
    rng, expected = random.Random(3), dict[int, list[list[int]]]()
    for rid in range(1, 25):
        prompt, most = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))], rng.randint(1, 14)
        if rid % 3:
            simulation.submit(rid, prompt, most, n=2, seed=rid, temperature=1.0)
            expected[rid] = [toy_output(prompt, most, 1.0, rid + index) for index in range(2)]
        else:
            width = rng.randint(2, 3)
            simulation.submit(rid, prompt, most, n=width, use_beam_search=True)
            expected[rid] = toy_beams(prompt, width, most)
    simulation.drain()
    for rid, outputs in expected.items():
        assert answers(simulation, rid, len(outputs)) == outputs, rid
    assert sum(done.preemptions for done in simulation.done.values()) > 0
    simulation.check_nothing_is_left()


def test_a_cancelled_search_leaves_nothing_behind() -> None:
    for rounds in range(6):
        simulation = Simulation(num_blocks=100, block_size=4)
        simulation.submit(1, [5] * 10, 20, n=3, use_beam_search=True)
        for _ in range(rounds):
            simulation.round()
        simulation.scheduler.cancel(1)
        simulation.check()
        simulation.drain()
        assert {simulation.finished[1, index].reason for index in range(3)} == {"abort"}
        simulation.check_nothing_is_left()


def test_a_lost_worker_starts_the_search_from_where_it_is() -> None:
    simulation = Simulation(num_blocks=100, block_size=4)
    simulation.submit(1, [5] * 10, 12, n=3, use_beam_search=True)
    for _ in range(5):
        simulation.round()
    simulation.restart()
    simulation.drain()
    assert answers(simulation, 1, 3) == toy_beams([5] * 10, 3, 12)
    simulation.check_nothing_is_left()


def test_more_beams_than_the_pool_holds_are_refused_with_the_numbers() -> None:
    simulation = Simulation(num_blocks=20, block_size=4)
    with pytest.raises(RequestError, match=r"4 beams of 40 tokens need 38 KV blocks, there are 19") as error:
        simulation.submit(1, [5] * 10, 30, n=4, use_beam_search=True)
    assert (error.value.status, error.value.param) == (400, "n")


def test_best_of_answers_the_likeliest_by_cumulative_logprob() -> None:
    prompt, most, seed = [7] * 5, 8, 11
    outputs = [toy_output(prompt, most, 1.0, seed + index) for index in range(5)]

    def cumulative(output: list[int]) -> float:
        steps = (dict(toy_candidates(prompt + output[:i], VOCAB - 1))[token] for i, token in enumerate(output))
        return sum(steps)

    wanted = sorted(outputs, key=cumulative, reverse=True)[:2]
    simulation = Simulation(num_blocks=100)
    simulation.submit(1, prompt, most, n=2, best_of=5, temperature=1.0, seed=seed)
    simulation.round()
    assert all(row.ranked for row in simulation.plans[0].new_rows), "by the model's own logprobs in every mode"
    simulation.receive()
    assert not simulation.outputs
    simulation.drain()
    assert answers(simulation, 1, 2) == wanted
    assert set(simulation.finished) == {(1, 0), (1, 1)}
    simulation.check_nothing_is_left()


def test_one_batch_with_all_kinds_gives_each_the_ids_it_has_alone() -> None:
    simulation = Simulation(num_blocks=100, max_num_seqs=16)
    simulation.submit(1, [1] * 9, 12)
    simulation.submit(2, [2] * 9, 12, n=4, seed=3, temperature=1.0)
    simulation.submit(3, [3] * 9, 12, n=4, use_beam_search=True)
    simulation.submit(4, [4] * 9, 12, seed=9, temperature=1.0)
    simulation.drain()
    assert answers(simulation, 1, 1) == [toy_output([1] * 9, 12)]
    assert answers(simulation, 2, 4) == [toy_output([2] * 9, 12, 1.0, 3 + index) for index in range(4)]
    assert answers(simulation, 3, 4) == toy_beams([3] * 9, 4, 12)
    assert answers(simulation, 4, 1) == [toy_output([4] * 9, 12, 1.0, 9)]


def test_a_search_of_one_beam_is_greedy() -> None:
    search = BeamSearch(1, 3, frozenset([9]))
    assert [fork.output.tokens for fork in search.advance([[(4, -0.5), (9, -0.6)]], [Output()])] == [[4]]
    assert [fork.output.tokens for fork in search.advance([[(5, -0.1), (9, -3.0)]], [Output([4])])] == [[4, 5]]
    search.advance([[(9, -0.2), (1, -0.3)]], [Output([4, 5])])
    assert search.done
    assert [hypothesis.output.tokens for hypothesis in search.hypotheses] == [[4, 5, 9]]
    assert search.hypotheses[0].cumulative == pytest.approx(-0.8)


@pytest.mark.parametrize("early", ["false", "true", "never"])
@pytest.mark.parametrize("penalty", [-100.0, 100.0])
def test_penalties_beyond_what_a_float_holds_end_nothing(penalty: float, early: str) -> None:
    """2,000 ** 100 has no float and 2,000 ** -100 is none but 0; a search with such a penalty is its own affair."""
    search = BeamSearch(2, 2000, frozenset([9]), penalty, early)
    outputs = [Output()]
    for step in range(2000):
        offers = [[(1, -0.1), (2, -0.2), (9, -0.3 if step > 1500 else -9.0)] for _ in outputs]
        forks = search.advance(offers, outputs)
        if search.done:
            break
        outputs = [fork.output for fork in forks]
    assert search.done
    assert search.hypotheses


def test_a_plan_log_names_beams(tmp_path: Path) -> None:
    """A beam has left its row, which it has for one step, by the time its plan is written down."""
    log = PlanLog(str(tmp_path / "plans.jsonl"))
    simulation = Simulation(num_blocks=100)
    simulation.submit(1, [5] * 6, 4, n=2, use_beam_search=True)
    while (plan := simulation.plan()) is not None:
        log.write(plan, simulation.scheduler)
        simulation.execute()
        simulation.retire()
    log.close()
    plans = [json.loads(line) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
    assert [sorted(chunk[0] for chunk in plan["chunks"]) for plan in plans] == [["1/0"], *[["1/0", "1/1"]] * 3]
