"""The block ledger: every block's state, owners, reason and time, and what everybody who waits waits for."""

from __future__ import annotations

from typing import Any

from services.scheduler import ledger
from tests.services.scheduler.simulation import Simulation

WALL = 1_700_000_000.0


def pages(simulation: Simulation) -> list[dict[str, Any]]:
    found, cursor = [], 1
    while cursor:
        page, cursor = ledger.page(simulation.scheduler, cursor, simulation.now, WALL + simulation.now)
        found.append(page)
    return found


def blocks(simulation: Simulation) -> dict[int, dict[str, Any]]:
    return {row["block"]: row for page in pages(simulation) for row in page["blocks"]}


def test_each_block_has_its_owners_its_reason_and_since_when() -> None:
    simulation = Simulation(num_blocks=200)
    simulation.now = 5.0
    simulation.submit(1, [1] * 20, 9, n=2)
    simulation.round()
    simulation.now = 6.0
    simulation.plan()
    rows = blocks(simulation)
    assert list(rows) == list(range(1, 200))
    owners = [{"request_id": "req-1", "rid": 1, "seq": seq, "state": "decode"} for seq in range(2)]
    assert rows[1]["owners"] == owners
    assert (rows[1]["state"], rows[1]["why"], rows[1]["since"], rows[1]["filled"]) == ("used", "prompt", WALL + 5, 16)
    assert rows[1]["key"] is not None and rows[1]["parent"] == 0
    assert rows[2]["owners"][0] in owners, "the last owner writes in place"
    assert rows[2]["key"] is None
    copies = {row["block"]: row["owners"] for row in rows.values() if row["why"] == "copy on write"}
    assert [owner for held in (rows[2]["owners"], *copies.values()) for owner in held if "seq" in owner]
    assert rows[100] == {
        "block": 100,
        "state": "free",
        "since": WALL,
        "why": "",
        "references": 0,
        "owners": [],
        "key": None,
    }
    simulation.drain()
    simulation.now = 9.0
    rows = blocks(simulation)
    assert (rows[1]["state"], rows[1]["owners"], rows[1]["since"]) == ("cached", [], WALL + 6)
    assert {row["state"] for row in rows.values()} == {"cached", "free"}


def test_a_block_that_a_step_copies_from_says_so_until_that_step_is_retired() -> None:
    simulation = Simulation()
    simulation.submit(1, [1] * 20, 9, n=2)
    simulation.plan()
    simulation.plan()
    owners = blocks(simulation)[2]["owners"]
    assert {"copied_in_step": 2} in owners and len(owners) == 2
    for _ in range(2):
        simulation.execute()
        simulation.retire()
    assert not any("copied_in_step" in owner for owner in blocks(simulation)[2]["owners"])


def test_whoever_waits_is_told_with_the_reason_and_pages_are_short() -> None:
    simulation = Simulation(num_blocks=100, max_num_seqs=1)
    for rid in range(1, 91):
        simulation.submit(rid, [rid % 60] * 20, 5, n=1)
    simulation.plan()
    found = pages(simulation)
    assert [len(page["blocks"]) for page in found] == [64, 35, 0, 0]
    assert [len(page["waiting"]) for page in found] == [0, 0, 64, 25]
    first = found[2]["waiting"][0]
    assert first == {"request_id": "req-2", "rid": 2, "seq": 0, "waits_for": "slots", "since": WALL}
    assert all(page["used"] + page["cached"] + page["free"] == page["usable"] == 99 for page in found)
    assert pages(Simulation())[-1]["blocks"][-1]["block"] == 63, "nobody waits: the blocks are all"
