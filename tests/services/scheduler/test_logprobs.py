"""Logprobs on their way from results to tokenizers: whole, in order and the same, whatever happens to a request."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.scheduler import Scheduler
from shared.errors import RequestError
from shared.logprobs import Found, by_entry
from shared.sampling import LogitRules
from tests.services.scheduler.simulation import EOS, OWNER, Simulation

PROMPT = [(7 * i) % 60 + 3 for i in range(70)]


class Told(Simulation):
    """Keeps the logprobs that came: of output tokens by (rid, seq), and of prompts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: dict[tuple[int, int], list[Found]] = {}
        self.prompts: dict[int, list[tuple[int, Found]]] = {}

    def receive(self, acknowledge: bool = True) -> None:
        for outbox in self.scheduler.streams.ready():
            message = outbox.take(self.scheduler.last_step)
            found, start = dict(by_entry(message.logprobs)) if message.logprobs else {}, 0
            self.prompts |= {one.rid: list(by_entry(one.logprobs)) for one in message.prompts}
            for rid, seq, offset, count in zip(
                message.rids, message.seqs, message.offsets, message.counts, strict=True
            ):
                known = self.told.setdefault((rid, seq), [])
                known[offset:] = [found[place] for place in range(start, start + count) if place in found]
                self.outputs.setdefault((rid, seq), [])[offset:] = message.ids[start : start + count].tolist()
                start += count
            self.finished |= {(one.rid, one.seq): one for one in message.finished}
            self.done |= {done.rid: done for done in message.done}
            if acknowledge:
                self.scheduler.streams.acknowledge([done.rid for done in message.done])
        self.check()


def whole(rid: int = 1, tokens: int = 12, **sampling: Any) -> Told:
    simulation = Told(max_num_batched_tokens=256)
    simulation.submit(rid, PROMPT, tokens, **sampling)
    simulation.drain()
    return simulation


def test_every_token_comes_with_what_was_asked_for() -> None:
    simulation = whole(logprobs=2, prompt_logprobs=1)
    assert [position for position, _ in simulation.prompts[1]] == list(range(1, len(PROMPT)))
    assert all(len(top_ids) == len(top) == 1 for _, (_, _, top_ids, top) in simulation.prompts[1])
    told = simulation.told[1, 0]
    assert len(told) == len(simulation.outputs[1, 0]) == 12
    for token, (sampled, rank, top_ids, top) in zip(simulation.outputs[1, 0], told, strict=True):
        assert (token, rank, sampled) == (top_ids[0], 1, top[0]) and len(top_ids) == 2  # greedy takes the likeliest
    simulation.check_nothing_is_left()


@pytest.mark.parametrize("tokens", [16, 23])
def test_prompts_in_chunks_beside_others_and_with_a_warm_cache_tell_the_same(tokens: int) -> None:
    """prompt_logprobs do not read the cache, and a prompt that is cached is computed again for them."""
    expected = whole(logprobs=2, prompt_logprobs=1)
    simulation = Told(max_num_batched_tokens=tokens)
    simulation.submit(5, PROMPT, 3)
    simulation.drain()
    simulation.submit(1, PROMPT, 12, logprobs=2, prompt_logprobs=1)
    simulation.submit(2, PROMPT, 12)
    simulation.drain()
    assert simulation.prompts == expected.prompts and simulation.told[1, 0] == expected.told[1, 0]
    assert simulation.told[2, 0] == simulation.told[5, 0] == []
    assert simulation.outputs[2, 0] == expected.outputs[1, 0]
    simulation.check_nothing_is_left()


def test_a_worker_that_lost_its_rows_in_the_prompt_or_later_tells_each_token_once() -> None:
    expected = whole(logprobs=0, prompt_logprobs=2, n=2, temperature=1.0, seed=3)
    for rounds in (2, 4, 7, 9):
        simulation = Told(max_num_batched_tokens=16)
        simulation.submit(1, PROMPT, 12, logprobs=0, prompt_logprobs=2, n=2, temperature=1.0, seed=3)
        for _ in range(rounds):
            simulation.round()
        simulation.restart()
        simulation.drain()
        assert (simulation.prompts, simulation.told) == (expected.prompts, expected.told)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_tell_what_they_tell_undisturbed(mode: str) -> None:
    alone = [whole(rid, 60, logprobs=1, prompt_logprobs=0, seed=rid, temperature=1.0) for rid in range(1, 7)]
    simulation = Told(num_blocks=12, host_blocks=12, preemption_mode=mode, max_num_batched_tokens=32)
    for rid in range(1, 7):
        simulation.submit(rid, PROMPT, 60, logprobs=1, prompt_logprobs=0, seed=rid, temperature=1.0)
    simulation.drain()
    assert sum(done.preemptions for done in simulation.done.values()) > 0
    assert simulation.told == {key: value for one in alone for key, value in one.told.items()}
    assert simulation.prompts == {key: value for one in alone for key, value in one.prompts.items()}
    simulation.check_nothing_is_left()


def test_a_lost_message_is_sent_again_with_its_logprobs() -> None:
    simulation = Told(max_num_batched_tokens=256)
    simulation.submit(1, PROMPT, 12, logprobs=1, prompt_logprobs=1)
    simulation.drain_without_receiving()
    for outbox in simulation.scheduler.streams.ready():
        outbox.take(1)  # and nobody gets it
    simulation.scheduler.streams.resume(OWNER, 1, 0, 0)
    simulation.receive()
    expected = whole(logprobs=1, prompt_logprobs=1)
    assert (simulation.prompts, simulation.told) == (expected.prompts, expected.told)


def test_best_of_tells_the_logprobs_of_those_it_chose() -> None:
    simulation = whole(logprobs=0, n=1, best_of=3, temperature=1.0, seed=5)
    samples = [whole(logprobs=0, temperature=1.0, seed=5 + i).told[1, 0] for i in range(3)]
    assert simulation.told[1, 0] == max(samples, key=lambda told: sum(sampled for sampled, *_ in told))


def test_rows_carry_rules_and_all_tokens_that_penalties_count() -> None:
    """Also after a recompute, when prompt and output are a prompt to the worker, and behind a cached prefix."""
    simulation = Told(max_num_batched_tokens=256)
    rules = LogitRules(presence_penalty=1.0, min_tokens=4)
    for rid in (1, 2):
        simulation.submit(rid, PROMPT, 8, rules=rules, stop_token_ids=[9], ignore_eos=rid == 2)
        simulation.drain()
    simulation.submit(3, PROMPT, 8, rules=rules)
    for _ in range(4):
        simulation.round()
    simulation.receive()
    simulation.restart()
    simulation.drain()
    first, cached, entered, again = [row.rules for one in simulation.plans for row in one.new_rows]
    assert first is not None and cached is not None and entered is not None and again is not None
    assert (first.tokens, first.prompt_tokens, first.stop_ids, first.rules) == (PROMPT, 70, [EOS, 9], rules)
    assert (cached.tokens, cached.stop_ids) == (PROMPT, [9])
    output = len(again.tokens) - 70
    assert 0 < output < 8 and again.tokens == PROMPT + simulation.outputs[3, 0][:output]
    plain = Told()
    plain.submit(1, PROMPT, 8)
    plain.drain()
    assert all(row.rules is None for one in plain.plans for row in one.new_rows)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"rules": LogitRules(logit_bias_ids=[64], logit_bias=[1.0])}, "logit_bias"),
        ({"rules": LogitRules(allowed_token_ids=[-1])}, "allowed_token_ids"),
        ({"rules": LogitRules(bad_words=[[3, 64]])}, "bad_words"),
        ({"rules": LogitRules(min_tokens=9)}, "min_tokens"),
        ({"rules": LogitRules(min_tokens=1, allowed_token_ids=[EOS])}, "allowed_token_ids"),
        ({"rules": LogitRules(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"rules": LogitRules(typical_p=0.5), "use_beam_search": True}, "use_beam_search"),
        ({"logprobs": 65}, "logprobs"),
        ({"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs"),
        ({"logprobs": 1, "logprob_token_ids": [1], "use_beam_search": True}, "logprob_token_ids"),
    ],
)
def test_what_cannot_be_is_refused(sampling: dict[str, Any], param: str) -> None:
    """vLLM 54195: an id outside the vocabulary in logit_bias wrote into a neighbour's row."""
    scheduler: Scheduler = Told().scheduler
    with pytest.raises(RequestError) as caught:
        scheduler.submit(OWNER, Told().message(1, PROMPT, 8, **sampling))
    assert caught.value.param == param
