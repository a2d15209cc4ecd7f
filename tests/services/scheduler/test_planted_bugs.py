"""Bugs of the kind that cost overlapped engines most, planted one at a time: the checks catch each of them.

Without a bug the same runs pass, which ``test_random`` shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from services.scheduler.decodes import Decodes
from services.scheduler.flight import Flight
from services.scheduler.limits import Limits
from services.scheduler.prefix_cache import Entry, PrefixCache
from services.scheduler.request import Sequence
from services.scheduler.rows import Rows
from services.scheduler.scheduler import Scheduler
from services.scheduler.steps import Draft
from services.scheduler.swaps import Swaps
from services.scheduler.tables import Tables
from services.worker.executor import PlanError
from tests.services.scheduler.test_random import RUN, run

RUNS = 40  # the most runs that may pass before a bug is noticed

Plant = Callable[[pytest.MonkeyPatch], None]


def free_before_retire(patch: pytest.MonkeyPatch) -> None:
    """Who leaves gives its blocks back at once, although a step in flight names them."""

    def planted(self: Flight, sequence: Sequence) -> None:
        self._tables.release(sequence)

    patch.setattr(Flight, "release", planted)


def publish_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks are found from the plan on that fills them, not from its retire on (vLLM PR 41400)."""
    commit = Scheduler._commit

    def planted(self: Scheduler, *args: Any) -> Any:
        plan = commit(self, *args)
        self._publish(self.steps[-1])
        return plan

    patch.setattr(Scheduler, "_commit", planted)


def copy_skipped(patch: pytest.MonkeyPatch) -> None:
    """A block is given a copy's place in the table, and the copy is never made."""
    patch.setattr(Draft, "copy", lambda self, source, destination: self.pins.append(source))


def parent_unchecked(patch: pytest.MonkeyPatch) -> None:
    """A hit compares the tokens, but not what came before them."""

    def planted(self: PrefixCache, entry: Entry, parent: Entry, tokens: bytes) -> bool:
        return entry.tokens == tokens

    patch.setattr(PrefixCache, "_is", planted)


def hash_kept_on_evict(patch: pytest.MonkeyPatch) -> None:
    """A block is another's, and still found by its old contents (kvcached 362)."""
    patch.setattr(PrefixCache, "evicted", lambda self, block: None)


def wrong_salt(patch: pytest.MonkeyPatch) -> None:
    """The tenant is left out of the key."""
    salt = Limits.salt
    patch.setattr(Limits, "salt", lambda self, cache_salt, tenant: salt(self, cache_salt, ""))


def double_free_on_abort(patch: pytest.MonkeyPatch) -> None:
    """An abort gives blocks back that are given back once more when their last step is retired."""
    cancel = Scheduler.cancel

    def planted(self: Scheduler, rid: int) -> None:
        cancel(self, rid)
        request = self.streams.requests.get(rid)
        for sequence in request.sequences if request else []:
            self.pool.release(sequence.blocks, sequence)

    patch.setattr(Scheduler, "cancel", planted)


def table_not_replaced(patch: pytest.MonkeyPatch) -> None:
    """A copy on write changes the scheduler's table, and the worker's stays as it was."""
    copy_forked_blocks = Decodes.copy_forked_blocks

    def planted(self: Decodes, draft: Draft) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(draft, "table", lambda slot, blocks: None)
            copy_forked_blocks(self, draft)

    patch.setattr(Decodes, "copy_forked_blocks", planted)


def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    """Nobody gets a copy: all write to the block they share."""
    patch.setattr(Tables, "unshare", lambda self, sequence, index, step_id: None)


def swap_order(patch: pytest.MonkeyPatch) -> None:
    """Blocks are copied to the host by a later plan than the one whose retire gives them to others."""
    take_out, late = Swaps.take_out, dict[Swaps, list[tuple[int, int]]]()

    def planted(self: Swaps, sequences: Iterable[Sequence]) -> list[tuple[int, int]]:
        moves, late[self] = late.get(self, []), take_out(self, sequences)
        return moves

    patch.setattr(Swaps, "take_out", planted)


def stale_row_after_resume(patch: pytest.MonkeyPatch) -> None:
    """A swapped row comes back to blocks that hold what they held before."""
    bring_back = Swaps.bring_back

    def planted(self: Swaps, group: list[Sequence], *, slack: int) -> list[tuple[int, int]] | None:
        moves = bring_back(self, group, slack=slack)
        return None if moves is None else []

    patch.setattr(Swaps, "bring_back", planted)


def paused_for_ever(patch: pytest.MonkeyPatch) -> None:
    """The scheduler counts on a paused row again, and never told the worker."""
    pause = Rows.pause
    patch.setattr(Rows, "pause", lambda self, slots: (pause(self, slots)[0], []))


@pytest.mark.parametrize(
    "plant",
    [
        free_before_retire,
        publish_early,
        copy_skipped,
        parent_unchecked,
        hash_kept_on_evict,
        wrong_salt,
        double_free_on_abort,
        table_not_replaced,
        no_copy_on_write,
        swap_order,
        stale_row_after_resume,
        paused_for_ever,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, PlanError, ValueError)):
        for seed in range(RUNS):
            run(random.Random(seed), RUN)
