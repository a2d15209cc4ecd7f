"""Beams of all requests with beam search, over the block tables that they share.

A beam has a row for one step at a time: its row computes the beam's last token and brings its candidates. Once all
beams of a request have theirs, the search says who lives on. Of several that go on from one beam, the first keeps its
table and the others fork it, taking the place of beams that died.
"""

from __future__ import annotations

from services.scheduler.beam_search import BeamSearch, Output
from services.scheduler.flight import Flight
from services.scheduler.request import Request, Sequence, State
from services.scheduler.tables import Tables


class Beams:
    def __init__(self, tables: Tables, flight: Flight) -> None:
        self.requests: dict[Request, None] = {}  # from their first admission to their end
        self._tables = tables
        self._flight = flight

    def between(self) -> list[Sequence]:
        """Beams without a slot that hold blocks."""
        return [one for request in self.requests for one in request.beams if one.state is State.BEAM and one.blocks]

    def reserved(self) -> int:
        """Rows that beams without one will need in a later step."""
        places = (one for request in self.requests for one in request.sequences)
        return sum(one.state is State.BEAM and one.slot < 0 for one in places)

    def ready(self) -> list[Sequence]:
        """Beams whose next step can be planned."""
        return [one for one in self.between() if one.offer is None and not self._flight.has(one.fence)]

    def written_next(self, beam: Sequence) -> tuple[Sequence, int]:
        """A beam, and where in its table the block is that its last token is stored in."""
        return beam, (beam.num_tokens - 1) // self._tables.block_size

    def blocks_needed(self, beams: list[Sequence]) -> int:
        writes = [self.written_next(beam) for beam in beams]
        growing = sum(index == len(beam.blocks) for beam, index in writes)
        return growing + self._tables.copies_needed(one for one in writes if one[1] < len(one[0].blocks))

    def stored(self, beam: Sequence) -> int:
        """Tokens whose KV it has once the steps in flight are retired: all, or all but the last."""
        is_computed = beam.offer is not None or self._flight.has(beam.fence)
        return beam.num_tokens if is_computed else beam.num_tokens - 1

    def advance(self, request: Request, search: BeamSearch) -> bool:
        """One step of the search, if all beams have their offers. Returns whether that was its last."""
        beams = request.beams
        offers = [beam.offer for beam in beams if beam.offer is not None]
        if len(offers) < len(beams):
            return False
        forks = search.advance(offers, [Output(beam.output, beam.logprobs) for beam in beams])
        if search.done:
            return True
        parents = {beams[fork.parent] for fork in forks}
        spare = [one for one in request.sequences if one not in parents]
        for one in spare:
            self._tables.release(one)
        request.beams = []
        for fork in forks:
            parent = beams[fork.parent]
            if parent in parents:
                parents.remove(parent)
                request.beams.append(parent)
            else:
                child = spare.pop()
                self._tables.fork(parent, child)
                child.fence = parent.fence
                request.beams.append(child)
        for beam, fork in zip(request.beams, forks, strict=True):
            beam.output, beam.logprobs = fork.output.tokens, fork.output.logprobs
            beam.cumulative, beam.offer = fork.score, None
        return False
