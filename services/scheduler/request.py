"""A request and its sequences: what the scheduler knows of them from SUBMIT until DONE is acknowledged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from services.scheduler.beam_search import BeamSearch
from services.scheduler.grammar import Grammar
from services.scheduler.outbox import Outbox
from services.scheduler.prefix_cache import Chain
from shared.codec import Int32, no_ids
from shared.logprobs import Found
from shared.sampling import SamplingParams
from shared.wire import Done, Finished

if TYPE_CHECKING:
    from services.scheduler.preemption import Decision


class State(Enum):
    WAITING = "waiting"  # never admitted yet
    FORK = "fork"  # waits for a sibling to compute the prompt of both
    PREFILL = "prefill"  # has a slot; its tokens are being computed in chunks
    DECODE = "decode"  # has a slot; one token in every plan
    BEAM = "beam"  # between two steps of its search, in which it has a slot; or not begun
    DRAIN = "drain"  # all its tokens are planned, the last is in flight; its slot is another's already
    PREEMPTED = "preempted"  # had a slot; comes back before newcomers
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer of a request."""

    request: Request
    index: int  # of the request's n, from 0
    output: list[int]  # accepted ids, all of them until the request is forgotten
    chain: Chain  # what the prefix cache has of it
    state: State = State.WAITING
    finished: Finished | None = None

    # ---- its row, and what of it is computed -----------------------------------------------------------------------
    slot: int = -1
    blocks: list[int] = field(default_factory=list)  # its block table
    fence: int = 0  # the last step that names its blocks; until that is retired they are not given back
    feed: Int32 = field(default_factory=no_ids)  # tokens to compute before it decodes: prompt + output at admission
    cached: int = 0  # how many of these had their KV at admission,
    computed: int = 0  # and how many are planned
    forks: list[Sequence] = field(default_factory=list)  # siblings that will sample from the prompt that it computes

    # ---- while it waits --------------------------------------------------------------------------------------------
    awaits: int = 0  # the step from which on others are to compute the next block that they share; 0: it does not wait
    awaited: bytes = b""  # the key of that block
    missing: int = 0  # blocks that it (of a swapped group, the first for all) lacked when it was last looked up
    passes: int = 0  # how often smaller ones were admitted before it because it did not fit
    preemptions: int = 0
    preempted_by: Decision | None = None  # what took its memory, until it decodes again
    host: list[int] = field(default_factory=list)  # its table on the host, while it is swapped

    # ---- logprobs, beams, grammars ---------------------------------------------------------------------------------
    cumulative: float = 0.0  # logprob of the output, where it is needed
    logprobs: list[Found] = field(default_factory=list)  # of each token of the output, where the request asked for them
    ahead_logprobs: list[Found] = field(default_factory=list)  # of the first of the tokens ahead, as far as computed
    offer: list[tuple[int, float]] | None = None  # what a beam whose step is done may go on with
    grammar: Grammar | None = None  # what the output is held to

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.output)

    @property
    def ahead(self) -> list[int]:
        """Tokens that follow the output in any case, and may be computed before they are told: one more is to sample.

        That is the last of them where nothing follows it and its logprob is needed, or one that a rule may forbid.
        """
        if self.grammar is None:
            return []
        given = self.given
        if self.request.tells_logprobs and self.grammar.is_over and len(given) == len(self.grammar.forced):
            given = given[:-1]
        return given[: self.request.max_tokens - 1 - len(self.output)]

    @property
    def given(self) -> list[int]:
        """What follows the output because the grammar says so, up to what another rule may forbid."""
        assert self.grammar is not None
        forced, rules = self.grammar.forced, self.request.sampling.rules
        if not forced or rules is None or not rules.can_forbid:
            return forced
        output = list(self.output)
        for place, token in enumerate(forced):
            if rules.may_forbid(token, output, self.request.stop_ids):
                return forced[:place]
            output.append(token)
        return forced

    @property
    def told_ahead(self) -> int:
        """The position of the first token ahead whose logprob is needed and not known; beyond them: none is."""
        end = self.num_tokens + len(self.ahead)
        return self.num_tokens + len(self.ahead_logprobs) if self.request.tells_logprobs else end

    def learn(self, found: Found) -> None:
        """The logprob of the next token of the output."""
        self.cumulative += found[0]
        if self.request.sampling.logprobs >= 0:
            self.logprobs.append(found)

    @property
    def leader(self) -> Sequence:
        """Of one that waits as a fork: the sibling that computes the prompt of both."""
        return next(one for one in self.request.sequences if self in one.forks)

    @property
    def victim_key(self) -> tuple[int, int, int, int]:
        """Preemption takes the largest: lowest priority first, then the least often preempted, then the newest."""
        return (self.request.priority, -self.preemptions, self.request.order, self.index)


@dataclass(eq=False, slots=True)
class Request:
    """Times are seconds on the scheduler's clock."""

    rid: int
    request_id: str
    outbox: Outbox
    prompt: Int32
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]  # end a sequence
    priority: int
    order: int  # place in the order of arrival
    arrived: float
    tenant: str = ""
    timeout: float = 0.0  # seconds after arrival until it has to be complete, 0 for any time
    sequences: list[Sequence] = field(default_factory=list)
    search: BeamSearch | None = None
    beams: list[Sequence] = field(default_factory=list)  # the sequences that its beams are, in the search's order
    cached_tokens: int = 0  # of the prompt, at its first admission
    prompt_logprobs: list[Found] = field(default_factory=list)  # from the second token on, as far as known, where asked
    scheduled: float | None = None  # when it was first admitted
    first_token: float | None = None
    ended: float = 0.0  # once done is set
    done: Done | None = None
    is_plain: bool = field(init=False)  # each of its tokens is told as it comes, by itself

    def __post_init__(self) -> None:
        sampling = self.sampling
        self.is_plain = not sampling.is_held and sampling.logprobs < 0 and sampling.prompt_logprobs < 0

    @property
    def is_held(self) -> bool:
        """Whether nothing of it may be told yet, because which tokens are the answer is only known at its end."""
        return self.done is None and self.sampling.is_held

    @property
    def tells_logprobs(self) -> bool:
        """Whether the logprob of each output token is needed."""
        return self.sampling.logprobs >= 0 or self.sampling.is_held

    @property
    def missing_prompt_logprobs(self) -> int:
        """As in SamplingParams; -1 once they are all there."""
        return self.sampling.prompt_logprobs if len(self.prompt_logprobs) < len(self.prompt) - 1 else -1

    @property
    def deadline(self) -> float:
        return self.arrived + self.timeout if self.timeout else math.inf

    @property
    def preemptions(self) -> int:
        return sum(sequence.preemptions for sequence in self.sequences)
