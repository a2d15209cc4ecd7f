from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from services.scheduler.ranks import RankError, Ranks
from shared.codec import int32, no_ids
from shared.errors import ConfigError, WireError
from shared.ids import Identity
from shared.peers import Peer
from shared.wire import PROTOCOL_VERSION, Hello, Memory, Result, checksum

MEMORY = Memory(100, 0, 16, 1024, 2048, 32000, [2], "digest")


def rank(index: int, epoch: int = 1, memory: Memory | None = MEMORY) -> Peer:
    identity = Identity.fresh("worker", index)
    return Peer(identity.encode(), identity, Hello(PROTOCOL_VERSION, "worker", index, epoch, memory=memory), 0.0)


def result(index: int, ids: list[int], step_id: int = 1, error: str = "") -> Result:
    slots = int32(range(len(ids)))
    sent = (slots, int32(ids)) if index == 0 else (no_ids(), no_ids())
    return Result(step_id, 1, 1, index, checksum(slots, int32(ids)), *sent, error=error)


def test_checksum_is_the_crc_of_little_endian_slots_then_ids() -> None:
    raw = bytes.fromhex("01000000 02000000 ff000000 00010000")
    assert checksum(int32([1, 2]), int32([255, 256])) == zlib.crc32(raw)


def test_the_smallest_offer_counts() -> None:
    ranks = Ranks(2)
    ranks.join(rank(1, 8, replace(MEMORY, num_blocks=90, max_model_len=4096)))
    assert not ranks.complete
    ranks.join(rank(0, 7))
    assert ranks.complete
    assert ranks.epoch == 7
    assert (ranks.memory().num_blocks, ranks.memory().max_model_len) == (90, 2048)


@pytest.mark.parametrize("field", ["model_digest", "dtype", "quantization"])
def test_ranks_of_different_models_cannot_work_together(field: str) -> None:
    ranks = Ranks(2)
    ranks.join(rank(0))
    ranks.join(rank(1, memory=replace(MEMORY, **{field: "other"})))
    with pytest.raises(ConfigError, match=f"worker rank 1 has {field} other, rank 0 {getattr(MEMORY, field)}"):
        ranks.memory()


def test_ranks_that_keep_kv_in_different_dtypes_cannot_work_together() -> None:
    ranks = Ranks(2)
    ranks.join(rank(0, memory=replace(MEMORY, kv_cache_dtype="bfloat16")))
    ranks.join(rank(1, memory=replace(MEMORY, kv_cache_dtype="int8")))
    with pytest.raises(ConfigError, match="worker rank 1 has kv_cache_dtype int8, rank 0 bfloat16"):
        ranks.memory()


def test_a_rank_too_many_or_twice_is_refused() -> None:
    ranks = Ranks(1)
    first = rank(0)
    ranks.join(first)
    ranks.join(first)
    with pytest.raises(WireError, match="rank 0 is here already"):
        ranks.join(rank(0))
    with pytest.raises(WireError, match="rank 1 is one too many"):
        ranks.join(rank(1))


def test_a_heartbeat_thread_belongs_to_the_rank_with_its_epoch() -> None:
    ranks = Ranks(1)
    main = rank(0, epoch=5)
    ranks.join(main)
    assert ranks.member_of(rank(0, epoch=5, memory=None)) is main
    assert ranks.member_of(rank(0, epoch=6, memory=None)) is None


def test_a_step_is_done_when_all_ranks_agree() -> None:
    ranks = Ranks(2)
    ranks.join(rank(0))
    ranks.join(rank(1))
    assert ranks.take(result(1, [7, 8])) is None
    assert ranks.missing(1) == [0]
    whole = ranks.take(result(0, [7, 8]))
    assert whole is not None
    assert whole.ids.tolist() == [7, 8]
    assert ranks.take(result(0, [7, 8], step_id=2)) is None
    with pytest.raises(RankError, match="worker rank 1 computed other tokens than rank 0 in step 2"):
        ranks.take(result(1, [7, 9], step_id=2))


def test_a_failed_step_names_the_rank() -> None:
    ranks = Ranks(2)
    with pytest.raises(RankError, match="worker rank 1 failed in step 3: out of memory"):
        ranks.take(result(1, [], step_id=3, error="out of memory"))
