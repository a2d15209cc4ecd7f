"""The worker's ranks: which are there, what they offer together, and when all of them have finished a step."""

from __future__ import annotations

from dataclasses import replace

from shared.errors import ConfigError, QuireError, WireError
from shared.peers import Peer
from shared.wire import Hello, Memory, Result, checksum


class RankError(QuireError):
    """A rank failed a step, or ranks disagree about its result."""


class Ranks:
    """``size`` ranks, 0 first. The worker epoch of plans and results is rank 0's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: dict[int, Peer] = {}
        self._results: dict[int, dict[int, Result]] = {}  # step id → rank → result

    @property
    def complete(self) -> bool:
        return len(self._members) == self.size

    @property
    def epoch(self) -> int:
        return self._members[0].hello.epoch

    def members(self) -> list[Peer]:
        return list(self._members.values())

    def join(self, peer: Peer) -> None:
        """Raises WireError when there is no place for this rank."""
        rank = peer.identity.index
        if rank >= self.size:
            raise WireError(f"worker rank {rank} is one too many: --tensor-parallel-size is {self.size}")
        if self._members.setdefault(rank, peer).raw != peer.raw:
            raise WireError(f"worker rank {rank} is here already")

    def member_of(self, peer: Peer) -> Peer | None:
        """The rank that ``peer`` is, or whose heartbeat thread it is."""
        member = self._members.get(peer.identity.index)
        return member if member is not None and member.hello.epoch == peer.hello.epoch else None

    def missing(self, step_id: int) -> list[int]:
        """Ranks that have not answered this step."""
        return [rank for rank in sorted(self._members) if rank not in self._results.get(step_id, {})]

    def memory(self) -> Memory:
        """What all ranks have. Raises ConfigError when they cannot work together."""
        offers = [(rank, _memory(self._members[rank].hello)) for rank in sorted(self._members)]
        first = offers[0][1]
        for rank, offer in offers[1:]:
            for name in (
                "block_size",
                "vocab_size",
                "eos_ids",
                "model_digest",
                "dtype",
                "defaults",
                "kv_cache_dtype",
                "quantization",
            ):
                if getattr(offer, name) != getattr(first, name):
                    raise ConfigError(
                        f"worker rank {rank} has {name} {getattr(offer, name)}, rank 0 {getattr(first, name)}"
                    )
        return replace(
            first,
            num_blocks=min(offer.num_blocks for _, offer in offers),
            host_blocks=min(offer.host_blocks for _, offer in offers),
            max_model_len=min(offer.max_model_len for _, offer in offers),
        )

    def take(self, result: Result) -> Result | None:
        """Rank 0's result once every rank has answered its step. Raises RankError when one failed or they differ."""
        if result.error:
            raise RankError(f"worker rank {result.rank} failed in step {result.step_id}: {result.error}")
        answers = self._results.setdefault(result.step_id, {})
        answers[result.rank] = result
        if len(answers) < self.size:
            return None
        del self._results[result.step_id]
        first = answers[0]
        expected = checksum(first.slots, first.ids)
        wrong = [rank for rank in sorted(answers) if answers[rank].checksum != expected]
        if wrong:
            names = ", ".join(str(rank) for rank in wrong)
            raise RankError(f"worker rank {names} computed other tokens than rank 0 in step {first.step_id}")
        return first

    def forget_steps(self) -> None:
        self._results.clear()


def _memory(hello: Hello) -> Memory:
    assert hello.memory is not None
    return hello.memory
