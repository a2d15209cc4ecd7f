"""A request and its sequences: what the scheduler knows of them from SUBMIT until DONE is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from services.scheduler.outbox import Outbox
from shared.codec import Int32, no_ids
from shared.sampling import SamplingParams
from shared.wire import Done, Finished


class State(Enum):
    WAITING = "waiting"  # never admitted yet
    PREFILL = "prefill"  # has a slot; its tokens are being computed in chunks
    DECODE = "decode"  # has a slot; one token in every plan
    DRAIN = "drain"  # all its tokens are planned, the last is in flight; its slot is another's already
    PREEMPTED = "preempted"  # had a slot; comes back before newcomers
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer of a request.

    output: accepted ids, all of them until the request is forgotten. blocks: its block table, empty without a slot.
    feed: the tokens to compute before it decodes (prompt + output at admission). computed: how many of these are
    planned. fence: the last step that names its blocks; until that one is retired they are not given back.
    """

    request: Request
    index: int
    output: list[int]
    state: State = State.WAITING
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    feed: Int32 = field(default_factory=no_ids)
    computed: int = 0
    fence: int = 0
    preemptions: int = 0
    finished: Finished | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def victim_key(self) -> tuple[int, int, int, int]:
        """Preemption takes the largest: lowest priority first, then the least often preempted, then the newest."""
        return (self.request.priority, -self.preemptions, self.request.order, self.index)


@dataclass(eq=False, slots=True)
class Request:
    """order: place in the order of arrival. stop_ids end a sequence. Times are seconds on the scheduler's clock."""

    rid: int
    request_id: str
    outbox: Outbox
    prompt: Int32
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    priority: int
    order: int
    arrived: float
    sequences: list[Sequence] = field(default_factory=list)
    scheduled: float | None = None
    first_token: float | None = None
    ended: float = 0.0  # once done is set
    done: Done | None = None

    @property
    def preemptions(self) -> int:
        return sum(sequence.preemptions for sequence in self.sequences)
