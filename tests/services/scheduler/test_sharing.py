"""Shared memory: forks with copy on write, and the prefix cache, on the null executor's checking memory."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest

from services.scheduler.block_pool import BlockState
from services.scheduler.prefix_cache import encode_salt
from tests.services.scheduler.simulation import VOCAB, Simulation, toy_output
from tests.services.scheduler.test_random import few_keys


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def copies(simulation: Simulation) -> int:
    return sum(len(plan.copies) // 2 for plan in simulation.plans)


def computed(simulation: Simulation) -> int:
    """Prompt tokens that were computed."""
    return sum(sum(plan.chunk_lens) for plan in simulation.plans)


def counter(simulation: Simulation, name: str) -> float:
    samples = simulation.scheduler.stats.registry.snapshot()[name][3]
    return float(sum(sample[1] for sample in samples))


def run(simulation: Simulation, rid: int, prompt: list[int], max_tokens: int = 4, **fields: Any) -> int:
    """Runs one request to its end; returns how many prompt tokens were cached."""
    simulation.submit(rid, prompt, max_tokens, **fields)
    simulation.drain()
    assert simulation.outputs[rid, 0] == toy_output(prompt, max_tokens)
    return simulation.done[rid].cached_tokens


# ---- parallel samples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "expected"), [(21, 3), (32, 0), (33, 3), (16, 0), (1, 3)])
def test_four_samples_compute_the_prompt_once_and_copy_only_a_partial_last_block(length: int, expected: int) -> None:
    simulation = Simulation(max_num_seqs=4)
    simulation.submit(1, tokens(length), 9, n=4, temperature=1.0, seed=70)
    simulation.plan()
    assert simulation.scheduler.pool.num_used == simulation.limits.blocks_for(length)
    assert [len(samples) for samples in simulation.plans[0].chunk_samples] == [4]
    simulation.drain()
    assert copies(simulation) == expected
    assert computed(simulation) == length
    for index in range(4):
        assert simulation.outputs[1, index] == toy_output(tokens(length), 9, 1.0, 70 + index)
    simulation.check_nothing_is_left()


def test_n_equals_single_requests_with_seeds_in_order() -> None:
    together, alone = Simulation(), Simulation()
    together.submit(1, tokens(21), 20, n=4, temperature=1.0, seed=5)
    together.drain()
    for index in range(4):
        alone.submit(index, tokens(21), 20, temperature=1.0, seed=5 + index)
    alone.drain()
    assert [together.outputs[1, i] for i in range(4)] == [alone.outputs[i, 0] for i in range(4)]


def test_a_chunked_prompt_forks_at_its_last_chunk() -> None:
    simulation = Simulation(max_num_batched_tokens=16)
    simulation.submit(1, tokens(50), 5, n=3, temperature=1.0)
    simulation.drain()
    assert [len(plan.chunk_samples[0]) for plan in simulation.plans if plan.chunk_samples] == [0, 0, 0, 3]
    assert copies(simulation) == 2
    assert [simulation.outputs[1, i] for i in range(3)] == [toy_output(tokens(50), 5, 1.0, i) for i in range(3)]


def test_a_group_waits_until_all_of_it_has_slots() -> None:
    simulation = Simulation(max_num_seqs=4)
    simulation.submit(1, tokens(5, 1), 10)
    simulation.plan()
    simulation.submit(2, tokens(5, 2), 3, n=4)
    simulation.round()
    assert simulation.scheduler.load.waiting == 4
    simulation.drain()
    assert [simulation.finished[2, i].tokens for i in range(4)] == [3] * 4


def test_one_sample_stopped_before_it_began_leaves_the_others_their_prompt() -> None:
    for stopped in range(3):
        for rounds in range(3):
            simulation = Simulation(max_num_batched_tokens=16)
            simulation.submit(1, tokens(40), 5, n=3, temperature=1.0)
            for _ in range(rounds):
                simulation.plan()
            simulation.scheduler.stop(1, stopped, 0)
            simulation.check()
            simulation.drain()
            for index in range(3):
                expected = [] if index == stopped else toy_output(tokens(40), 5, 1.0, index)
                assert simulation.outputs.get((1, index), []) == expected
            simulation.check_nothing_is_left()


@pytest.mark.parametrize("rounds", range(5))
def test_a_cancelled_group_leaves_nothing(rounds: int) -> None:
    simulation = Simulation(max_num_batched_tokens=16)
    simulation.submit(1, tokens(40), 9, n=4)
    for _ in range(rounds):
        simulation.round()
    simulation.plan()
    simulation.scheduler.cancel(1)
    simulation.drain()
    assert {simulation.finished[1, i].reason for i in range(4)} == {"abort"}
    simulation.check_nothing_is_left()


# ---- hits ----------------------------------------------------------------------------------------------------------


def test_greedy_ids_are_the_same_cold_warm_partly_inside_a_block_and_wholly_cached() -> None:
    prompt = tokens(64)
    simulation = Simulation()
    assert run(simulation, 1, prompt) == 0  # cold
    assert run(simulation, 2, prompt) == 63  # wholly cached: the last token is computed again
    assert run(simulation, 3, prompt[:50] + tokens(20, 1)) == 50  # three blocks, and two tokens of another by copy
    assert run(simulation, 4, prompt[:32] + tokens(20, 2)) == 32
    assert run(simulation, 5, prompt[:20]) == 19
    assert run(simulation, 6, [*prompt, 5, 6, 7]) == 64
    assert run(simulation, 7, tokens(30, 3)) == 0
    cold = Simulation(enable_prefix_caching=False)
    assert run(cold, 1, prompt) == run(cold, 2, prompt) == 0
    assert counter(simulation, "vllm:prefix_cache_queries") == 64 + 64 + 70 + 52 + 20 + 67 + 30
    assert counter(simulation, "vllm:prefix_cache_hits") == 63 + 50 + 32 + 19 + 64
    assert counter(simulation, "vllm:prompt_tokens_cached") == 63 + 50 + 32 + 19 + 64


def test_a_wholly_cached_prompt_computes_its_last_token_only_and_writes_nothing_shared() -> None:
    """The query is never empty: k blocks, all cached, compute one token (nano-vllm 144)."""
    simulation = Simulation()
    run(simulation, 1, tokens(48))
    simulation.plans.clear()
    simulation.submit(2, tokens(48), 3)
    simulation.drain()
    first = simulation.plans[0]
    assert (first.new_rows[0].length, first.chunk_starts, first.chunk_lens) == (48, [47], [1])
    assert copies(simulation) == 0
    assert simulation.outputs[2, 0] == toy_output(tokens(48), 3)


def test_output_is_cached_as_well_as_prompts() -> None:
    simulation = Simulation()
    run(simulation, 1, tokens(20), 40)  # 59 tokens have KV: the last one was never an input
    whole = tokens(20) + toy_output(tokens(20), 40)
    assert run(simulation, 2, [*whole, 1]) == 48  # three blocks; the fourth was never full
    assert run(simulation, 3, whole[:40]) == 39


def test_blocks_of_aborted_requests_stay_cached() -> None:
    simulation = Simulation(max_num_batched_tokens=16)
    simulation.submit(1, tokens(64), 5)
    simulation.plan()
    simulation.plan()
    simulation.scheduler.cancel(1)
    simulation.drain()
    assert simulation.done[1].completion_tokens == 0
    assert run(simulation, 2, tokens(64)) == 32, "two chunks of one block each were written"


def test_thirty_two_requests_at_once_compute_their_common_prefix_once_into_one_set_of_blocks() -> None:
    common = tokens(512)
    simulation = Simulation(num_blocks=300, max_num_seqs=32, max_num_batched_tokens=600)
    for rid in range(32):
        simulation.submit(rid, [*common, *tokens(10, rid + 1)], 30)
    for _ in range(4):
        simulation.round()
    tables = [sequence.blocks for sequence in simulation.scheduler.rows.occupants()]
    assert len(tables) == 32
    shared = tables[0][:32]
    assert all(table[:32] == shared for table in tables)
    assert [simulation.scheduler.pool.references(block) for block in shared] == [32] * 32
    assert computed(simulation) == 512 + 32 * 10
    simulation.drain()
    for rid in range(32):
        assert simulation.outputs[rid, 0] == toy_output([*common, *tokens(10, rid + 1)], 30)
    assert sorted(simulation.done[rid].cached_tokens for rid in range(32)) == [0] + [512] * 31
    simulation.check_nothing_is_left()


def test_whoever_waits_for_anothers_prefix_goes_on_when_that_one_is_cancelled() -> None:
    simulation = Simulation(max_num_batched_tokens=100)
    for rid in (1, 2):
        simulation.submit(rid, [*tokens(64), rid], 3)
    simulation.plan()
    assert simulation.scheduler.admission.waiting_by_reason() == {"prefix": 1}
    simulation.scheduler.cancel(1)
    simulation.drain()
    assert simulation.outputs[2, 0] == toy_output([*tokens(64), 2], 3)
    assert simulation.done[2].cached_tokens == 64, "what was written when it ended is there"


def test_two_equal_prompts_in_one_batch_each_give_what_they_give_alone() -> None:
    """Equal prompts at the same time do not share live partial blocks (MinivLLM 98)."""
    simulation = Simulation()
    for rid in (1, 2, 3):
        simulation.submit(rid, tokens(23), 30)
    simulation.drain()
    for rid in (1, 2, 3):
        assert simulation.outputs[rid, 0] == toy_output(tokens(23), 30)


# ---- what must not hit ---------------------------------------------------------------------------------------------


def test_a_hash_collision_is_a_miss_and_is_counted() -> None:
    """Equal keys of different tokens never give wrong KV (openvino.genai 3722, vLLM PR 12621, llama.cpp 27148)."""
    simulation = Simulation(num_blocks=200, digest=few_keys)
    for rid in range(40):
        run(simulation, rid, tokens(40, rid % 20))
    assert counter(simulation, "quire:prefix_cache_collisions") > 0


def test_a_child_of_another_parent_with_equal_keys_is_a_miss() -> None:
    """With one key for everything, only the very parent that was matched leads to a child."""
    simulation = Simulation(digest=lambda data: b"same")
    run(simulation, 1, tokens(33))
    assert len(simulation.scheduler.tables.cache) == 1
    assert run(simulation, 2, tokens(33)) == 16
    assert run(simulation, 3, tokens(16, 9) + tokens(33)[16:]) == 0


def test_keys_are_a_cryptographic_hash_of_128_bits_over_the_whole_prefix() -> None:
    """Nobody makes collisions on purpose (vLLM PR 54727): BLAKE2b, by the definition."""
    simulation = Simulation()
    run(simulation, 1, tokens(33))
    cache, pool = simulation.scheduler.tables.cache, simulation.scheduler.pool
    ids = np.asarray(tokens(33), dtype="<i4").tobytes()
    root = hashlib.blake2b(b"", digest_size=16).digest()
    first = hashlib.blake2b(root + ids[:64], digest_size=16).digest()
    second = hashlib.blake2b(first + ids[64:128], digest_size=16).digest()
    found = [entry.key for block in range(1, 64) if (entry := cache.entry_of(block)) is not None]
    assert sorted(found) == sorted([first, second])
    assert pool.num_cached == 2


def test_salt_parts_are_typed_and_length_prefixed() -> None:
    """A cache_salt "X" and a tenant or adapter "X" are different salts (vLLM 44701)."""
    parts = ("cache_salt", "tenant", "adapter")
    salts = [encode_salt(**{part: "X"}) for part in parts]
    salts += [encode_salt(cache_salt="a", tenant="b"), encode_salt(cache_salt="at\1\0\0\0b"), encode_salt()]
    salts += [encode_salt(cache_salt="at"), encode_salt(cache_salt="", tenant="at")]
    assert len(set(salts)) == len(salts)


def test_the_same_salt_hits_and_another_misses() -> None:
    """Time to first token tells nothing of a prompt under another salt (CVE-2025-46570)."""
    simulation = Simulation()
    cached = [run(simulation, rid, tokens(33), cache_salt=salt) for rid, salt in enumerate(["", "a", "", "a", "b"], 1)]
    assert cached == [0, 0, 32, 32, 0]


@pytest.mark.parametrize(("isolation", "expected"), [("none", [0, 32, 32]), ("tenant", [0, 0, 32])])
def test_prefix_isolation_keeps_tenants_apart(isolation: str, expected: list[int]) -> None:
    simulation = Simulation(prefix_isolation=isolation)
    cached = [run(simulation, rid, tokens(33), tenant=tenant) for rid, tenant in enumerate("aba", 1)]
    assert cached == expected


def test_a_block_is_found_only_once_its_step_is_retired() -> None:
    """Nobody hits KV that is not written yet (vLLM PR 41400)."""
    simulation = Simulation()
    simulation.submit(1, tokens(33), 5)
    simulation.plan()
    assert len(simulation.scheduler.tables.cache) == 0
    simulation.execute()
    assert len(simulation.scheduler.tables.cache) == 0
    simulation.retire()
    assert len(simulation.scheduler.tables.cache) == 2


def test_a_restart_empties_the_cache() -> None:
    simulation = Simulation()
    run(simulation, 1, tokens(33))
    simulation.restart()
    assert run(simulation, 2, tokens(33)) == 0


# ---- eviction ------------------------------------------------------------------------------------------------------


def test_look_up_pins_what_it_found_before_room_is_made() -> None:
    """The blocks that a prompt hits are not evicted for its other blocks (vLLM 42948)."""
    simulation = Simulation(num_blocks=11)
    run(simulation, 1, tokens(80))  # five blocks, the oldest in the cache
    run(simulation, 2, tokens(75, 1))
    assert simulation.scheduler.pool.num_cached >= 9
    assert run(simulation, 3, tokens(80) + tokens(60, 2)) >= 80


def test_an_evicted_block_is_found_no_more() -> None:
    """A block given to another has lost its key (kvcached 362)."""
    simulation = Simulation(num_blocks=7)
    run(simulation, 1, tokens(64))
    run(simulation, 2, tokens(90, 1))
    cache = simulation.scheduler.tables.cache
    assert run(simulation, 3, tokens(64)) == 0
    assert counter(simulation, "quire:prefix_cache_evictions") > 0
    pool = simulation.scheduler.pool
    assert all((cache.entry_of(b) is None) == (pool.state(b) is BlockState.FREE) for b in range(1, 7))


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    simulation = Simulation(num_blocks=9)
    run(simulation, 1, tokens(96))
    run(simulation, 2, tokens(50, 1))
    assert 0 < run(simulation, 3, tokens(96)) < 96


def test_eviction_takes_the_least_recently_used() -> None:
    simulation = Simulation(num_blocks=10)
    run(simulation, 1, tokens(48, 1))
    run(simulation, 2, tokens(48, 2))
    run(simulation, 3, tokens(48, 1))  # used again
    run(simulation, 4, tokens(60, 4))
    assert run(simulation, 5, tokens(48, 1)) == 47
    assert run(simulation, 6, tokens(48, 2)) < 47


def test_an_idle_server_uses_nothing_and_can_give_everything() -> None:
    simulation = Simulation(num_blocks=9)
    for rid in range(20):
        run(simulation, rid, tokens(70, rid))
    pool = simulation.scheduler.pool
    assert (pool.num_used, pool.num_available) == (0, 8)
    assert simulation.scheduler.load.usage == 0.0


# ---- explain -------------------------------------------------------------------------------------------------------


def test_explain_names_the_reason_of_each_kind_of_miss() -> None:
    simulation = Simulation(num_blocks=20)
    cache = simulation.scheduler.tables.cache

    def miss(prompt: list[int], salt: str = "") -> Any:
        ids = np.asarray(prompt, dtype="<i4").tobytes()
        return cache.explain(simulation.scheduler.limits.salt(salt, ""), ids)["miss"]

    prompt = tokens(48)
    assert miss(prompt) == {"why": "never cached", "position": 0}
    run(simulation, 1, prompt)
    assert miss(prompt) is None
    assert miss(prompt, "x") == {"why": "salt", "position": 0, "blocks_under_another_salt": 3}
    other = [*prompt[:20], (prompt[20] + 1) % VOCAB, *prompt[21:]]
    expected = {"why": "first different token", "position": 20, "token": other[20], "cached_token": prompt[20]}
    assert miss(other) == expected
    assert miss([*prompt, 1, 2, 3]) == {"why": "never cached", "position": 48}
    run(simulation, 2, tokens(280, 7), 10)
    assert miss(prompt)["why"] == "evicted"
