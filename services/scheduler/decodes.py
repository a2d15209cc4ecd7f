"""The next token of every decoding row and of every beam, and the block that it is stored in."""

from __future__ import annotations

from services.scheduler.flight import Flight
from services.scheduler.request import Sequence
from services.scheduler.running import Running
from services.scheduler.stats import Stats
from services.scheduler.steps import Draft
from services.scheduler.tables import Tables
from shared.codec import int32


class Decodes:
    def __init__(self, tables: Tables, running: Running, flight: Flight, stats: Stats) -> None:
        self._tables = tables
        self._rows = running.rows
        self._beams = running.beams
        self._flight = flight
        self._stats = stats

    def blocks_needed(self) -> int:
        """Blocks that decoding rows and beams take in the next step."""
        copies = self._tables.copies_needed(map(self._written_next, self._rows.writing_to_forked()))
        beams = self._beams.blocks_needed(self._beams.ready()) if self._beams.requests else 0
        return len(self._rows.needing_block()) + copies + beams

    def short_of_memory(self) -> list[int]:
        """Decoding slots that need a block for their next token; they pause while victims are swapped out for them."""
        return [*self._rows.needing_block(), *self._rows.writing_to_forked()]

    def append_blocks(self, draft: Draft) -> None:
        for slot in self._rows.needing_block():
            (block,) = self._tables.grow(self._rows.occupant(slot), 1, "output")
            self._rows.capacity[slot] += self._tables.block_size
            draft.append(slot, block)

    def copy_forked_blocks(self, draft: Draft) -> None:
        """Whoever writes to a block that others hold too gets a copy of it; the last of them writes in place."""
        for slot in self._rows.writing_to_forked():
            sequence, index = self._written_next(slot)
            if self._unshare(draft, sequence, index):
                draft.table(slot, sequence.blocks)

    def make_room_for_next(self, draft: Draft, sequence: Sequence) -> None:
        """The block of a sequence's next token is there, and its alone. Its whole table has to go into the plan."""
        _, index = self._written_next(sequence.slot)
        if index == len(sequence.blocks):
            self._tables.grow(sequence, 1, "output")
        else:
            self._unshare(draft, sequence, index)

    def plan_beams(self, draft: Draft) -> int:
        """Plans one token of each beam that is ready; returns how many those are."""
        ready = self._beams.ready() if self._beams.requests else []
        for beam in ready:
            last = beam.num_tokens - 1
            _, index = self._beams.written_next(beam)
            if index == len(beam.blocks):
                self._tables.grow(beam, 1, "output")
            else:
                self._unshare(draft, beam, index)
            beam.slot, beam.fence = self._rows.occupy(beam), self._flight.next_step
            draft.new_row(beam, self._rows.generations[beam.slot], last)
            draft.table(beam.slot, beam.blocks)
            draft.chunk(beam, last, int32(beam.output[-1:]), [beam])
            draft.beams.append(beam)
        return len(ready)

    def _written_next(self, slot: int) -> tuple[Sequence, int]:
        """A decoding sequence, and where in its table the block is that its next token is stored in."""
        return self._rows.occupant(slot), int(self._rows.length[slot]) // self._tables.block_size

    def _unshare(self, draft: Draft, sequence: Sequence, index: int) -> bool:
        """Before a write to a block of a table. Whether the table has a copy in its place now."""
        copy = self._tables.unshare(sequence, index, self._flight.next_step)
        if copy is None:
            return False
        draft.copy(*copy)
        self._stats.copied("write")
        return True
