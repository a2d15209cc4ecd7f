"""Random submits, cancels, stops, restarts and late results, on the null executor's checking memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.prefix_cache import digest
from services.scheduler.streams import RESEND_AFTER
from tests.services.scheduler.simulation import EOS, OWNER, VOCAB, Simulation, toy_output


def few_keys(data: bytes) -> bytes:
    """Keys of four bits: most of them collide."""
    return bytes([digest(data)[0] & 15])


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
            enable_prefix_caching=rng.random() < 0.9,
            prefix_isolation=rng.choice(["none", "tenant"]),
            digest=rng.choice([digest, few_keys]),
        )
        self.prompts: list[list[int]] = []
        self.expected: dict[tuple[int, int], list[int]] = {}
        self.keeps: dict[tuple[int, int], int] = {}
        self.cancelled: set[int] = set()
        self.next_rid = 1

    def step(self) -> None:
        simulation, rng = self.simulation, self.rng
        match rng.choices(
            ["plan", "execute", "retire", "submit", "cancel", "stop", "receive", "resume", "restart"],
            [30, 30, 30, 14, 2, 2, 8, 1, 0.3],
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
            case "restart":
                simulation.restart()

    def submit(self) -> None:
        rng, limit = self.rng, self.simulation.limits.max_model_len
        length = rng.randint(1, max(1, min(limit - 1, 40)))
        max_tokens = rng.randint(1, max(1, min(limit - length, 40)))
        if length + max_tokens > limit:
            return
        prompt = self.prompt(length)
        temperature, seed, n = rng.choice([0.0, 1.0, 2.0]), rng.randrange(100), rng.choice([1, 1, 1, 2, 4])
        if n > self.simulation.limits.max_num_seqs:
            return
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        outputs = [toy_output(prompt, max_tokens, temperature, seed + index) for index in range(n)]
        generated = [output[: rng.randint(0, len(output))] for output in outputs] if rng.random() < 0.2 else None
        self.simulation.submit(
            rid,
            prompt,
            max_tokens,
            generated,
            temperature=temperature,
            seed=seed,
            n=n,
            priority=rng.randint(0, 2) if self.simulation.limits.scheduling_policy == "priority" else 0,
            tenant=rng.choice("abc"),
            cache_salt=rng.choice(["", "", "x"]),
        )
        self.expected |= {(rid, index): output for index, output in enumerate(outputs)}

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
                assert finished.reason == ("stop" if expected[-1] == EOS else "length")
            assert output[: finished.tokens] == expected
            assert finished.tokens == len(expected)


@pytest.mark.parametrize("seed", range(12))
def test_a_long_random_run(seed: int) -> None:
    driver = Driver(random.Random(seed))
    for _ in range(1500):
        driver.step()
    driver.finish()


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 120))
def test_short_random_runs(rng: random.Random, steps: int) -> None:
    driver = Driver(rng)
    for _ in range(steps):
        driver.step()
    driver.finish()
