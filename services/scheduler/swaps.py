"""Groups of sequences whose KV goes to the host's memory, lies there, and comes back."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.flight import Flight
from services.scheduler.host_pool import HostPool
from services.scheduler.request import Sequence
from services.scheduler.tables import Tables


class Swaps:
    """``Sequence.host`` is a sequence's table on the host, from the decision to swap it until it is back.

    A block that several sequences of a group share is moved once and shared on the host too. ``leaving``: sequences
    whose blocks no plan has copied yet.
    """

    def __init__(self, tables: Tables, host: HostPool, flight: Flight) -> None:
        self.host = host
        self.leaving: list[Sequence] = []
        self._tables = tables
        self._flight = flight

    def start(self, group: Iterable[Sequence]) -> None:
        """Gives the sequences, which hold their blocks on, places on the host, of which there must be enough."""
        places: dict[int, int] = {}
        for sequence in group:
            shared = [places[block] for block in sequence.blocks if block in places]
            self.host.share(shared)
            new = [block for block in sequence.blocks if block not in places]
            places.update(zip(new, self.host.allocate(len(new)), strict=True))
            sequence.host = [places[block] for block in sequence.blocks]
            self.leaving.append(sequence)

    def ready(self) -> list[Sequence]:
        """Those of the ``leaving`` that no step in flight writes to any more: the next plan can copy their blocks."""
        return [sequence for sequence in self.leaving if not self._flight.has(sequence.fence)]

    def take_out(self, sequences: Iterable[Sequence]) -> list[tuple[int, int]]:
        """The copies (block, host block) that the next plan makes for these of the ``leaving``."""
        moves: dict[int, int] = {}
        for sequence in sequences:
            self.leaving.remove(sequence)
            moves.update(zip(sequence.blocks, sequence.host, strict=True))
        return list(moves.items())

    def bring_back(self, group: list[Sequence], *, slack: int) -> list[tuple[int, int]] | None:
        """Gives all of the group their tables again, if there is room: the copies (host block, block) for that.

        What is still cached on the device is not moved. The rest is moved once and shared as before, but for a block
        that its holders write to next: each of them gets one. None: no room while ``slack`` blocks stay available.
        """
        pool, size = self._tables.pool, self._tables.block_size
        missing: dict[Sequence, list[tuple[int, int]]] = {}  # (host block, whose: 0 for all holders, else an own one)
        extra = 0
        for number, sequence in enumerate(group, 1):
            entries = self._tables.look_up(sequence).entries[: sequence.cached // size]
            sequence.blocks = [entry.block for entry in entries]
            sequence.chain.entries = list(entries)
            pool.share(sequence.blocks, sequence)
            full = sequence.cached // size
            rest = enumerate(sequence.host[len(entries) :], len(entries))
            missing[sequence] = [(host, 0 if index < full else number) for index, host in rest]
            extra += sequence.cached % size == 0
        needed = len({one for wanted in missing.values() for one in wanted}) + extra
        if needed > pool.num_available - slack:
            for sequence in group:
                self._tables.release(sequence)
            group[0].missing = needed
            return None
        group[0].missing = 0
        placed: dict[tuple[int, int], int] = {}
        for sequence in group:
            for one in missing[sequence]:
                if one in placed:
                    pool.share([placed[one]], sequence)
                    sequence.blocks.append(placed[one])
                else:
                    (placed[one],) = self._tables.grow(sequence, 1, "swapped in")
        return [(host, block) for (host, _), block in placed.items()]

    def forget(self, sequence: Sequence) -> None:
        """Whatever a sequence has on the host, or on the way there, is of no use any more."""
        places, sequence.host = sequence.host, []
        if sequence in self.leaving:
            self.leaving.remove(sequence)
            self._flight.release(sequence)
            self.host.release(places)
        else:
            self._flight.release_host(places, sequence.fence)
