"""Random submits, cancels, stops, restarts and late results, on the null executor's checking memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.prefix_cache import digest
from services.scheduler.streams import RESEND_AFTER
from shared.errors import RequestError
from shared.wire import Plan
from tests.services.scheduler.simulation import EOS, OWNER, VOCAB, Simulation, toy_logprob, toy_output
from tests.services.scheduler.test_beams import toy_beams
from tests.services.scheduler.toy_grammar import GRAMMARS, constrained_output, new_grammar

OPERATIONS = 300_000
RUN = 500  # operations of one driver, before everything is drained and compared
MOST_OPEN = 12  # requests at a time, so that checking them all after every operation stays cheap


def few_keys(data: bytes) -> bytes:
    """Keys of four bits: most of them collide."""
    return bytes([digest(data)[0] & 15])


def slow(plan: Plan) -> dict[str, float]:
    """Steps long enough for prompts to be cut into blocks."""
    total = 0.01 * bool(plan.decodes) + 0.002 * len(plan.tokens)
    swapped = {name: 1e-5 for name in ("swap_out", "swap_in") if len(getattr(plan, name))}
    return {"forward": total, "total": total, **swapped}


class Driver:
    """Random operations on a simulation, and what must come of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.simulation = Simulation(
            num_blocks=rng.choice([6, 10, 30]),
            block_size=rng.choice([1, 4, 16]),
            max_num_seqs=rng.choice([1, 3, 8]),
            max_num_batched_tokens=rng.choice([8, 16, 64]),
            scheduling_policy=rng.choice(["fcfs", "priority", "fair"]),
            preemption_mode=rng.choice(["recompute", "swap", "auto"]),
            host_blocks=rng.choice([0, 4, 30]),
            enable_prefix_caching=rng.random() < 0.9,
            prefix_isolation=rng.choice(["none", "tenant"]),
            max_step=rng.choice([0.0, None, 0.02]),
            digest=rng.choice([digest, few_keys]),
        )
        self.simulation.timings = slow
        self.held = rng.random() < 0.4
        self.prompts: list[list[int]] = []
        self.salted: dict[int, tuple[tuple[str, str], list[int]]] = {}  # by rid: what must be equal to share; prompt
        self.expected: dict[tuple[int, int], list[int]] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.keeps: dict[tuple[int, int], int] = {}
        self.cancelled: set[int] = set()
        self.next_rid = 1

    def step(self) -> None:
        simulation, rng = self.simulation, self.rng
        match rng.choices(
            ["plan", "execute", "retire", "submit", "cancel", "stop", "receive", "resume", "wait", "restart"],
            [30, 30, 30, 14, 2, 2, 8, 1, 2, 0.3],
        )[0]:
            case "plan":
                simulation.plan()
            case "execute":
                simulation.execute()
            case "retire":
                simulation.retire()
            case "submit":
                self.submit()
            case "cancel":
                rid = rng.randint(1, self.next_rid + 1)
                if rid < self.next_rid:
                    self.cancelled.add(rid)
                    simulation.scheduler.cancel(rid)
                    simulation.check()
            case "stop":
                self.stop()
            case "receive":
                simulation.receive(acknowledge=rng.random() < 0.9)
            case "resume":
                rid = rng.choice([*simulation.scheduler.streams.requests, 0])
                if rid:
                    simulation.scheduler.streams.resume(OWNER, rid, 0, rng.randint(0, 3))
            case "wait":
                simulation.now += RESEND_AFTER
                simulation.scheduler.expire()
            case "restart":
                simulation.restart()

    def submit(self) -> None:
        rng, limit = self.rng, self.simulation.limits.max_model_len
        if len(self.simulation.scheduler.streams.requests) >= MOST_OPEN:
            return
        length = rng.randint(1, max(1, min(limit - 1, 40)))
        max_tokens = rng.randint(1, max(1, min(limit - length, 40)))
        if length + max_tokens > limit:
            return
        prompt = self.prompt(length)
        temperature, seed, n = rng.choice([0.0, 1.0, 2.0]), rng.randrange(100), rng.choice([1, 1, 1, 2, 4])
        if n > self.simulation.limits.max_num_seqs:
            return
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        grammar = rng.choice(GRAMMARS) if rng.random() < 0.25 else None
        seeds = range(seed, seed + n)
        if grammar is None:
            outputs = [toy_output(prompt, max_tokens, temperature, one) for one in seeds]
            reasons = ["stop" if output[-1] == EOS else "length" for output in outputs]
        else:
            ends = [constrained_output(prompt, grammar, max_tokens, temperature, one) for one in seeds]
            outputs, reasons = [output for output, _ in ends], [reason for _, reason in ends]
        generated = [output[: rng.randint(0, len(output))] for output in outputs] if rng.random() < 0.2 else None
        kind: dict[str, Any] = {"logprobs": 1} if grammar is not None and generated is None and rid % 2 else {}
        if self.held and grammar is None and rng.random() < 0.4:  # n of these, which only their end tells
            generated, n = None, min(n, 2)
            if rng.random() < 0.5:
                max_tokens = min(max_tokens, 8)  # the plain search is slow
                kind = {"use_beam_search": True, "early_stopping": rng.choice(["true", "false", "never"])}
                outputs = toy_beams(prompt, n, max_tokens, early=kind["early_stopping"])
            else:
                kind = {"best_of": len(outputs)}
                if len(outputs) > n:
                    outputs = sorted(outputs, key=lambda output: -toy_logprob(prompt, output))[:n]
        tenant, cache_salt = rng.choice("abc"), rng.choice(["", "", "x"])
        isolated = self.simulation.limits.prefix_isolation == "tenant"
        self.salted[rid] = ((cache_salt, tenant if isolated else ""), prompt)
        try:
            self.simulation.submit(
                rid,
                prompt,
                max_tokens,
                generated,
                temperature=temperature,
                seed=seed,
                n=n,
                priority=rng.randint(0, 2) if self.simulation.limits.scheduling_policy == "priority" else 0,
                tenant=tenant,
                cache_salt=cache_salt,
                grammar=None if grammar is None else new_grammar(grammar),
                **kind,
            )
        except RequestError as error:
            assert "beams of" in error.message, error.message
            del self.salted[rid]
            return
        if grammar is None and kind:
            reasons = ["stop" if output[-1] == EOS else "length" for output in outputs]
        self.expected |= {(rid, index): output for index, output in enumerate(outputs)}
        self.reasons |= {(rid, index): reason for index, reason in enumerate(reasons)}

    def prompt(self, length: int) -> list[int]:
        """New tokens, or an old prompt up to somewhere, gone on differently or cut short."""
        rng = self.rng
        old = rng.choice(self.prompts)[: rng.randint(1, length)] if self.prompts and rng.random() < 0.7 else []
        prompt = old + [rng.randrange(VOCAB) for _ in range(0 if old and rng.random() < 0.3 else length - len(old))]
        self.prompts = [*self.prompts[-7:], prompt]
        return prompt

    def stop(self) -> None:
        """The tokenizer stops a sequence it has tokens of, after fewer than it has."""
        live = [key for key, output in self.simulation.outputs.items() if output and key not in self.keeps]
        if live:
            key = self.rng.choice(live)
            self.keeps[key] = self.rng.randint(0, len(self.simulation.outputs[key]))
            if key[0] in self.simulation.scheduler.streams.requests and key[0] not in self.cancelled:
                self.simulation.scheduler.stop(*key, self.keeps[key])
            else:
                del self.keeps[key]
            self.simulation.check()

    def finish(self) -> None:
        self.simulation.receive()
        self.simulation.drain()
        self.simulation.now += RESEND_AFTER
        assert self.simulation.scheduler.expire() == []
        self.simulation.receive()
        self.simulation.check_nothing_is_left()
        for key, expected in self.expected.items():
            output, finished = self.simulation.outputs.get(key, []), self.simulation.finished[key]
            if (key in self.keeps and finished.reason == "stop" and finished.tokens == self.keeps[key]) or (
                key[0] in self.cancelled and finished.reason == "abort"
            ):
                expected = expected[: finished.tokens]
            else:
                assert finished.reason == self.reasons[key]
            assert output[: finished.tokens] == expected
            assert finished.tokens == len(expected)
        if not self.held:  # beams that died have computed what is in no answer
            self.check_cached()

    def check_cached(self) -> None:
        """No request had more of its prompt cached than it shares with what others under its salt computed."""
        for rid, done in self.simulation.done.items():
            salt, prompt = self.salted[rid]
            shared = [
                _common(prompt, other + self.expected[key, index])
                for key, (other_salt, other) in self.salted.items()
                if other_salt == salt and key != rid
                for index in range(4)
                if (key, index) in self.expected
            ]
            assert done.cached_tokens <= max(shared, default=0), f"request {rid} hit what was not there for it"


def _common(some: list[int], others: list[int]) -> int:
    """How many tokens at the start of both are equal."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(some), len(others)))


def run(rng: random.Random, operations: int) -> None:
    driver = Driver(rng)
    for _ in range(operations):
        driver.step()
    driver.finish()


@pytest.mark.parametrize("start", range(0, OPERATIONS, OPERATIONS // 20))
def test_random_operations_by_a_seeded_driver(start: int) -> None:
    for seed in range(start, start + OPERATIONS // 20, RUN):
        run(random.Random(seed), RUN)


@settings(max_examples=80, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(40, 100))
def test_random_operations_by_hypothesis(rng: random.Random, operations: int) -> None:
    """5,000 operations and more, shrunk to the fewest that fail."""
    run(rng, operations)
