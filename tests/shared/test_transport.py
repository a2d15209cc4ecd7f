"""Real sockets: addresses, CURVE, and that a stranger is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from shared.errors import ConfigError
from shared.transport import (
    ClusterKey,
    Endpoint,
    Security,
    bind_router,
    check_connectable,
    connect_dealer,
    own_address_towards,
    start_zap,
)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_both_addresses_follow_from_one() -> None:
    local, remote = Endpoint("ipc:///run/q"), Endpoint("tcp://host:5555")
    assert (local.clients, local.workers) == ("ipc:///run/q/clients", "ipc:///run/q/workers")
    assert (remote.clients, remote.workers) == ("tcp://host:5555", "tcp://host:5556")


@pytest.mark.parametrize("base", ["", "ipc://relative", "http://host:1", "tcp://host", "tcp://host:65535", "tcp://:1"])
def test_bad_addresses_are_named(base: str) -> None:
    with pytest.raises(ConfigError, match="neither ipc:///directory nor tcp://host:port"):
        Endpoint(base)


def test_plain_tcp_needs_the_flag(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(ConfigError, match="--cluster-key-file, or --insecure-tcp"):
        bind_router(context, "tcp://127.0.0.1:*", Security())
    router, address = bind_router(context, "tcp://127.0.0.1:*", Security(insecure_tcp=True))
    router.close()
    assert address.startswith("tcp://127.0.0.1:")


def test_a_taken_address_is_one_clear_error(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address already in use"):
            bind_router(context, address, Security(insecure_tcp=True))


def test_the_key_file_is_made_once_and_guarded(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert ClusterKey.load(path) == ClusterKey.load(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        ClusterKey.load(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="40-character"):
        ClusterKey.load(path)


def test_processes_that_all_start_at_once_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for folder in (tmp_path / str(number) for number in range(50)):
            folder.mkdir()
            keys = set(pool.map(ClusterKey.load, [folder / "key"] * 16))
            assert len(keys) == 1
            assert [entry.name for entry in folder.iterdir()] == ["key"]


def test_only_holders_of_the_key_get_through(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    ours, theirs = (Security(ClusterKey.load(tmp_path / name)) for name in ("ours", "theirs"))
    zap = start_zap(context, ours)
    try:
        router, address = bind_router(context, "tcp://127.0.0.1:*", ours)
        member = connect_dealer(context, b"member", address, ours)
        stranger = connect_dealer(context, b"stranger", address, theirs)
        # A stranger that knows the public key of the deployment still has no secret of ours.
        spy = context.socket(zmq.DEALER)
        spy.curve_publickey, spy.curve_secretkey = zmq.curve_keypair()
        assert ours.key is not None
        spy.curve_serverkey = ours.key.public
        spy.connect(address)
        plain = connect_dealer(context, b"plain", address, Security(insecure_tcp=True))
        for sock in (stranger, spy, plain, member):
            sock.send(b"hello")
        assert router.poll(5000)
        assert router.recv_multipart() == [b"member", b"hello"]
        assert not router.poll(300)
        for sock in (router, stranger, spy, plain, member):
            sock.close(0)
    finally:
        zap.stop()


def test_own_address_towards_loopback() -> None:
    assert own_address_towards("tcp://127.0.0.1:5555") == "127.0.0.1"


@pytest.mark.parametrize("address", ["ipc:///tmp/a", "ipc:///" + "x" * 106, "tcp://h:1", "tcp://[::1]:65535"])
def test_connectable_addresses(address: str) -> None:
    check_connectable(address)


@pytest.mark.parametrize(
    "address",
    [
        *("", "ipc://relative", "ipc:///" + "x" * 107, "ipc:///" + "é" * 54, "inproc://x", "http://h:5"),
        *("tcp://*:5", "tcp://h:*", "tcp://h:0", "tcp://h", "tcp://h:70000", "tcp://:5", "tcp://h:5/x"),
    ],
)
def test_what_no_socket_can_connect_to(address: str) -> None:
    with pytest.raises(ConfigError):
        check_connectable(address)
