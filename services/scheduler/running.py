"""Who runs: sequences with a row, and beams between two steps."""

from __future__ import annotations

from services.scheduler.beams import Beams
from services.scheduler.flight import Flight
from services.scheduler.queues import Queues
from services.scheduler.request import Sequence, State
from services.scheduler.rows import Rows


class Running:
    def __init__(self, rows: Rows, beams: Beams, queues: Queues, flight: Flight) -> None:
        self.rows = rows
        self.beams = beams
        self._queues = queues
        self._flight = flight

    def sequences(self) -> list[Sequence]:
        return [*self.rows.occupants(), *self.beams.between()]

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody has or will need to go on."""
        forks = sum(len(sequence.forks) for sequence in self._queues.prefilling)
        return self.rows.num_free - forks - (self.beams.reserved() if self.beams.requests else 0)

    def rows_needed(self, sequence: Sequence) -> int:
        """Rows for all that the admission of a sequence brings with it."""
        request = sequence.request
        if request.search is None:
            return 1 + len(sequence.forks)
        return 1 if request in self.beams.requests else len(request.sequences)

    def stored(self, sequence: Sequence) -> int:
        """Tokens whose KV a running sequence has once the steps in flight are retired."""
        if sequence.state is State.DECODE:
            return int(self.rows.length[sequence.slot])
        return self.beams.stored(sequence) if sequence.state is State.BEAM else sequence.computed

    def vacate(self, sequence: Sequence) -> None:
        """Takes a sequence out of all later plans. Its blocks come back when the last step naming them is retired."""
        if sequence.state is State.DECODE:
            sequence.fence = self._flight.last_step  # a decoding row is in every plan; a paused one just waits longer
        if sequence.slot >= 0:
            self.rows.vacate(sequence.slot)
        sequence.slot = -1
        if not sequence.host:  # else its blocks are still to be swapped out
            self._flight.release(sequence)
