"""A link to nobody, and to a peer whose directory is gone."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from shared import link
from shared.ids import Identity
from shared.link import Link
from shared.transport import Security, bind_router
from shared.wire import PROTOCOL_VERSION, Heartbeat, Hello, Welcome, encode

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("HEARTBEAT_INTERVAL", 0.05), ("SILENCE_LIMIT", 0.2), ("REMIND_EVERY", 0.2)):
        monkeypatch.setattr(link, name, seconds)


class Ends:
    """The owner of a link, and what it was told."""

    def __init__(self, address: str) -> None:
        self.context = zmq.asyncio.Context()
        self.lost: list[str] = []
        self.gone: list[str] = []
        self.welcomed = asyncio.Event()
        self.link = Link(
            self.context,
            Identity.fresh("gateway", 0).encode(),
            address,
            Security(insecure_tcp=True),
            name="the scheduler",
            hello=lambda: Hello(PROTOCOL_VERSION, "gateway", 0, 1),
            heartbeat=lambda lag: Heartbeat(1, 0, lag),
            on_message=lambda message: None,
            on_welcome=lambda welcome: self.welcomed.set(),
            on_lost=self.lost.append,
            on_gone=self.gone.append,
        )
        self.link.start()

    async def close(self) -> None:
        await self.link.close()
        self.context.destroy(linger=0)


def test_waiting_is_told_again_and_again_and_a_directory_may_come_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"ipc://{tmp_path}/later/clients"

    async def run() -> Ends:
        ends = Ends(address)
        await asyncio.sleep(0.7)
        await ends.close()
        return ends

    with caplog.at_level(logging.WARNING):
        ends = asyncio.run(run())
    assert 2 <= caplog.messages.count(f"still waiting for the scheduler at {address}") <= 3
    assert not ends.gone


@pytest.mark.parametrize("removed", [True, False])
def test_only_a_peer_without_a_directory_is_gone(tmp_path: Path, removed: bool) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()

    async def run() -> Ends:
        context = zmq.asyncio.Context()
        router, address = bind_router(context, f"ipc://{directory}/clients", Security())
        ends = Ends(address)
        raw, *_ = await router.recv_multipart()
        await router.send_multipart([raw, *encode(Welcome(1, 1, 16, 100, 100, 100, [2], "digest"))])
        await asyncio.wait_for(ends.welcomed.wait(), 5)
        assert ends.link.welcomed
        router.close(0)
        context.term()
        if removed:
            shutil.rmtree(directory)
        await asyncio.sleep(0.8)
        await ends.close()
        return ends

    ends = asyncio.run(run())
    assert len(ends.lost) == 1
    assert ends.gone == ([f"the scheduler is gone: {directory} no longer exists"] if removed else [])
