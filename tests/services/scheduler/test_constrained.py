"""Sequences that are held to a grammar: masks, runs that the grammar forces, and every way in which they end.

``test_random`` holds such requests, among others and through preemptions and restarts, to the null model's answers.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from services.scheduler import constrained
from services.scheduler.constrained import Constrained
from services.scheduler.grammar import Grammar
from services.worker.executor import PlanError, StepOutput
from shared.codec import int32
from shared.errors import RequestError
from shared.grammar import GrammarError
from shared.sampling import LogitRules
from shared.wire import Mask
from tests.services.scheduler.simulation import EOS, OWNER, VOCAB, Simulation, toy_candidates, toy_logprob
from tests.services.scheduler.test_logprobs import Told
from tests.services.scheduler.toy_grammar import (
    GRAMMARS,
    SPELLINGS,
    constrained_output,
    new_grammar,
    text_of,
    vocabulary,
)

PROMPT = [5, 9, 17, 30, 4]
RUN = 'start: /[xy]/ "namenamenamename" /[xy]/ "}"'  # a choice, sixteen letters that are none, a choice


def finish(simulation: Simulation, rid: int = 1, seq: int = 0) -> tuple[str, str]:
    """The text of a sequence, and why it ended."""
    simulation.drain()
    return text_of(simulation.outputs.get((rid, seq), [])), simulation.finished[rid, seq].reason


def one(grammar: str, max_tokens: int = 40, **fields: Any) -> Simulation:
    simulation = Simulation()
    simulation.submit(1, PROMPT, max_tokens, grammar=new_grammar(grammar), **fields)
    return simulation


def test_a_run_without_choice_is_one_chunk() -> None:
    simulation = one(RUN)
    text, reason = finish(simulation)
    assert re.fullmatch("[xy]namenamenamename[xy]}", text) and reason == "stop"
    chunks = [count for plan in simulation.plans for count in plan.chunk_lens]
    ids = simulation.outputs[1, 0]
    assert ids[1:5] == [ids[1]] * 4  # "name" four times
    assert chunks == [len(PROMPT), 4]
    # The prompt, the step that samples the first "name" under a mask for it alone, the run, and one step too many: the
    # end needs none, as "}" is all that may follow.
    assert len(simulation.plans) == 4
    assert simulation.plans[2].release == [row.slot for row in simulation.plans[2].new_rows] != []
    assert simulation.plans[2].new_rows[0].length == len(PROMPT) + 1
    simulation.check_nothing_is_left()


def test_a_beginning_without_choice_is_computed_with_the_prompt() -> None:
    simulation = one('start: "namenamename" /[0-9]/')
    text, reason = finish(simulation)
    assert re.fullmatch("namenamename[0-9]", text) and reason == "stop"
    assert [count for plan in simulation.plans for count in plan.chunk_lens] == [len(PROMPT) + 3]


def test_an_answer_without_choice_needs_no_step() -> None:
    simulation = one('start: "abcabcname"', n=3)
    assert [finish(simulation, seq=seq) for seq in range(3)] == [("abcabcname", "stop")] * 3
    assert not simulation.plans
    assert simulation.done[1].completion_tokens == 9
    simulation.check_nothing_is_left()


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_max_tokens_cuts_runs_as_anything_else(grammar: str, max_tokens: int) -> None:
    simulation = one(grammar, max_tokens)
    expected, reason = constrained_output(PROMPT, grammar, max_tokens)
    assert finish(simulation) == (text_of(expected), reason)
    assert simulation.outputs.get((1, 0), []) == expected
    simulation.check_nothing_is_left()


def test_runs_longer_than_the_budget_are_cut() -> None:
    simulation = Simulation(max_num_batched_tokens=8, max_num_seqs=2)
    grammar = 'start: /[xy]/ "' + "name" * 30 + '" /[xy]/'
    for rid in (1, 2):
        simulation.submit(rid, PROMPT, 40, grammar=new_grammar(grammar))
    for rid in (1, 2):
        text, _ = finish(simulation, rid)
        assert re.fullmatch("[xy](name){30}[xy]", text)
    assert max(sum(plan.chunk_lens) + plan.decodes for plan in simulation.plans) <= 8


def test_runs_wait_for_nobodys_memory() -> None:
    """Two blocks are left: a run takes what there is, nobody is preempted for it, and the rest comes later."""
    simulation = Simulation(num_blocks=8, block_size=4, max_num_seqs=2)
    grammar = 'start: /[xy]/ "' + "name" * 10 + '" /[xy]/'
    simulation.submit(1, [7] * 8, 12)
    simulation.submit(2, [8] * 4, 12, grammar=new_grammar(grammar))
    text, reason = finish(simulation, 2)
    assert re.fullmatch("[xy](name){10}[xy]", text) and reason == "stop"
    assert simulation.done[2].preemptions == simulation.done[1].preemptions == 0


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [6, 64])
def test_logprobs_change_nothing_and_tell_of_every_token(grammar: str, n: int, tokens: int) -> None:
    """Runs too, in chunks, with the whole beginning cached, and after the worker has lost its rows."""
    plain = one(grammar, n=n, temperature=1.0, seed=4)
    plain.drain()
    simulation = Told(max_num_batched_tokens=tokens, max_num_seqs=4, block_size=4)
    for rid in (1, 2):
        simulation.submit(rid, PROMPT, 40, grammar=new_grammar(grammar), n=n, temperature=1.0, seed=4, logprobs=2)
        for _ in range(5 * (rid - 1)):
            simulation.round()
        if rid == 2:
            simulation.restart()
        simulation.drain()
        for seq in range(n):
            output = simulation.outputs.get((rid, seq), [])
            assert output == plain.outputs.get((1, seq), [])
            assert simulation.finished[rid, seq].reason == plain.finished[1, seq].reason
            told = simulation.told.get((rid, seq), [])
            for place, (token, (sampled, _, top_ids, top)) in enumerate(zip(output, told, strict=True)):
                before = PROMPT + output[:place]
                assert sampled == toy_logprob(before, [token])
                assert list(zip(top_ids, top, strict=True)) == toy_candidates(before, 2)
    simulation.check_nothing_is_left()


def test_where_logprobs_are_told_runs_are_chunks_too() -> None:
    simulation = one(RUN, logprobs=0)
    simulation.drain()
    assert [count for plan in simulation.plans for count in plan.chunk_lens] == [len(PROMPT), 4]
    (run,) = [row.run for plan in simulation.plans for row in plan.new_rows if row.run is not None]
    output = simulation.outputs[1, 0]
    assert (run.start, run.tokens) == (len(PROMPT) + 1, output[1:5])


def test_named_tokens_are_told_of_in_runs_too() -> None:
    simulation = Told()
    simulation.submit(1, PROMPT, 40, grammar=new_grammar(RUN), logprobs=2, logprob_token_ids=[40, 7])
    simulation.drain()
    output, told = simulation.outputs[1, 0], simulation.told[1, 0]
    assert len(told) == len(output) == 7
    for place, (_, _, ids, values) in enumerate(told):
        assert ids == [40, 7]
        assert values == [toy_logprob(PROMPT + output[:place], [token]) for token in ids]


@pytest.mark.parametrize("rule", [{"min_tokens": 2}, {"allowed_token_ids": list(range(VOCAB))}, {"bad_words": [[1]]}])
def test_rules_that_forbid_nothing_of_a_run_leave_it_whole(rule: dict[str, Any]) -> None:
    simulation = one(RUN, rules=LogitRules(**rule))
    simulation.drain()
    assert [count for plan in simulation.plans for count in plan.chunk_lens] == [len(PROMPT), 4]


@pytest.mark.parametrize(
    ("rule", "chunks"),
    [
        ({"bad_words": [["name", "name", "name"]]}, [5, 2]),  # the third "name" is looked at by itself
        ({"bad_words": [["name"]]}, [5]),
        ({"allowed_token_ids": ["x", "y", "}"]}, [5]),
    ],
)
def test_a_run_ends_before_what_a_rule_may_forbid(rule: dict[str, list[Any]], chunks: list[int]) -> None:
    def ids(value: Any) -> Any:
        return SPELLINGS.index(value) if isinstance(value, str) else [ids(one) for one in value]

    simulation = one(RUN, rules=LogitRules(**{name: ids(value) for name, value in rule.items()}))
    simulation.drain()
    assert [count for plan in simulation.plans for count in plan.chunk_lens] == chunks


def test_best_of_ranks_outputs_that_all_follow_the_grammar() -> None:
    simulation = one(RUN, n=2, best_of=4, temperature=1.0, seed=3)
    for seq in range(2):
        text, reason = finish(simulation, seq=seq)
        assert re.fullmatch("[xy]namenamenamename[xy]}", text) and reason == "stop"


def test_samples_of_one_prompt_have_matchers_of_their_own() -> None:
    simulation = one(GRAMMARS[3], n=4, temperature=1.0, seed=11)
    texts = [finish(simulation, seq=seq)[0] for seq in range(4)]
    assert all(re.fullmatch("[a-c]{2,9}name[0-9]+}", text) for text in texts)
    assert len(set(texts)) > 1


def test_ignore_eos_goes_on_while_the_grammar_can() -> None:
    simulation = one("start: /[a-z]*/", 30, ignore_eos=True)
    text, reason = finish(simulation)
    assert reason == "length"
    assert EOS not in simulation.outputs[1, 0]
    assert re.fullmatch("[a-z]+", text)
    assert finish(one("start: /[a-z]{3}/", 30, ignore_eos=True))[1] == "stop"


def test_a_stop_token_in_a_run_ends_it() -> None:
    name = vocabulary().tokenize_str("name")[0]
    simulation = one(RUN, stop_token_ids=[name])
    text, reason = finish(simulation)
    assert (text[1:], reason, simulation.finished[1, 0].stop_reason) == ("name", "stop", str(name))


def test_a_stop_string_keeps_what_came_before_it() -> None:
    simulation = one(GRAMMARS[2], 30)
    for _ in range(12):
        simulation.round()
    simulation.receive()
    simulation.scheduler.stop(1, 0, 4)
    assert finish(simulation)[1] == "stop"
    assert simulation.finished[1, 0].tokens == 4
    simulation.check_nothing_is_left()


@pytest.mark.parametrize("cut", range(12))
def test_a_resubmission_goes_on_where_it_was(cut: int) -> None:
    grammar = GRAMMARS[4]
    whole, _ = constrained_output(PROMPT, grammar, 40)
    simulation = Simulation()
    simulation.submit(1, PROMPT, 40, generated=[whole[:cut]], grammar=new_grammar(grammar))
    assert finish(simulation) == (text_of(whole), "stop")
    simulation.check_nothing_is_left()


def test_a_resubmission_of_something_else_is_refused() -> None:
    with pytest.raises(RequestError, match="generated: does not follow the grammar") as caught:
        Simulation().submit(1, PROMPT, 40, generated=[[EOS + 1]], grammar=new_grammar('start: "n" /x+/'))
    assert (caught.value.status, caught.value.param) == (400, "generated")


def test_beams_are_not_held_to_grammars() -> None:
    with pytest.raises(RequestError, match="beams cannot be held to a grammar"):
        one(RUN, use_beam_search=True, n=2)


def test_a_row_with_nothing_left_ends_alone() -> None:
    """The worker answers -1 where mask and rules together leave no token."""
    simulation = Simulation()
    simulation.submit(1, PROMPT, 8, grammar=new_grammar(GRAMMARS[2]))
    simulation.submit(2, PROMPT[1:], 8)
    simulation.plan()
    simulation.execute()
    step_id, output = simulation.executed.pop()
    (row,) = [row for row in simulation.plans[0].new_rows if row.masked]
    ids = np.where(output.slots == row.slot, -1, output.ids)
    simulation.executed.append((step_id, StepOutput(output.slots, int32(ids), output.timings)))
    simulation.retire()
    simulation.drain()
    ended = simulation.finished[1, 0]
    assert (ended.reason, ended.code, ended.message) == ("error", "grammar_failed", constrained.NOTHING_LEFT)
    assert simulation.finished[2, 0].reason == "length"
    simulation.check_nothing_is_left()


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_complex(self: Grammar) -> bytes:
        raise GrammarError("ParserTooComplex")

    simulation = one(GRAMMARS[2])
    simulation.submit(2, PROMPT, 8)
    monkeypatch.setattr(Grammar, "allowed", too_complex)
    simulation.drain()
    assert simulation.finished[1, 0].message.endswith("ParserTooComplex")
    assert simulation.finished[2, 0].reason == "length"
    simulation.check_nothing_is_left()


def test_a_grammar_that_takes_too_long_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ambiguous grammar takes ever longer, and everybody in its batch would wait."""
    monkeypatch.setattr("services.scheduler.grammar.STEP_SECONDS", 0.0)
    monkeypatch.setattr("services.scheduler.grammar.BURST_SECONDS", 0.002)
    simulation = one('start: a\na: a a a | /[xy]/ | a "z" a |', 1000, ignore_eos=True)
    simulation.submit(2, PROMPT, 8)
    simulation.drain()
    assert "of processor time" in simulation.finished[1, 0].message
    assert simulation.finished[1, 0].code == "grammar_failed"
    assert simulation.finished[2, 0].reason == "length"


def test_a_plain_batch_has_no_masks() -> None:
    simulation = Simulation()
    simulation.submit(1, PROMPT, 8)
    simulation.drain()
    assert not simulation.masks
    assert not any(row.masked for plan in simulation.plans for row in plan.new_rows)


# ---- bugs of this kind, planted one at a time ------------------------------------------------------------------------


def mask_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """What may follow is looked up before the last token is taken in."""
    allowed, kept = Grammar.allowed, dict[int, bytes]()

    def late(self: Grammar) -> bytes:
        before = kept.get(id(self))
        kept[id(self)] = allowed(self)
        return kept[id(self)] if before is None else before

    patch.setattr(Grammar, "allowed", late)


def finished_rows_keep_their_masks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Constrained, "_allowed", lambda self, step, sequence, position: constrained._bits([3], self._words))


def run_begins_too_late(patch: pytest.MonkeyPatch) -> None:
    """The first token of a run is taken as computed already."""
    plan_run = Constrained._plan_run

    def planted(self: Constrained, draft: Any, sequence: Any, most: int) -> int:
        self._rows.length[sequence.slot] += 1
        return plan_run(self, draft, sequence, most)

    patch.setattr(Constrained, "_plan_run", planted)


def run_without_unsharing(patch: pytest.MonkeyPatch) -> None:
    """A run is written to a block that siblings hold too."""
    from services.scheduler.tables import Tables

    patch.setattr(Tables, "unshare", lambda self, sequence, index, step_id: None)


@pytest.mark.parametrize(
    "plant", [mask_of_the_step_before, finished_rows_keep_their_masks, run_begins_too_late, run_without_unsharing]
)
def test_a_planted_bug_is_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, PlanError, ValueError, KeyError)):
        for grammar in GRAMMARS:
            simulation = Simulation(block_size=4)
            simulation.submit(1, PROMPT, 30, grammar=new_grammar(grammar), n=3, temperature=1.0)
            simulation.drain()
            for seq in range(3):
                expected, reason = constrained_output(PROMPT, grammar, 30, 1.0, seq)
                assert simulation.outputs.get((1, seq), []) == expected
                assert simulation.finished[1, seq].reason == reason
            simulation.check_nothing_is_left()


def test_the_oracle_agrees_without_a_bug() -> None:
    for grammar in GRAMMARS:
        simulation = Simulation(block_size=4)
        simulation.submit(1, PROMPT, 30, grammar=new_grammar(grammar), n=3, temperature=1.0)
        simulation.drain()
        for seq in range(3):
            assert simulation.outputs.get((1, seq), []) == constrained_output(PROMPT, grammar, 30, 1.0, seq)[0]


def test_masks_are_bits_in_the_order_of_the_wire() -> None:
    simulation = one('start: /[ax]/ "}"')
    simulation.plan()
    mask = simulation.masks[1]
    assert isinstance(mask, Mask) and len(mask.bits) == -(-VOCAB // 32)
    allowed = {token for token in range(VOCAB) if int(np.uint32(mask.bits[token // 32])) >> token % 32 & 1}
    a, x = vocabulary().tokenize_str("a")[0], vocabulary().tokenize_str("x")[0]
    assert allowed == {a, x}
    assert simulation.scheduler.mask() is None  # once for each step
    assert simulation.scheduler.streams.requests[1].outbox.owner == OWNER
