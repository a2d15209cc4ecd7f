from __future__ import annotations

import socket

import pytest

from services.launcher.launcher import listen_socket
from shared.errors import ConfigError


def test_the_port_is_held_but_not_open_yet() -> None:
    with listen_socket("127.0.0.1", 0) as sock:
        assert sock.get_inheritable()
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(sock.getsockname())


def test_a_taken_port_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            listen_socket("127.0.0.1", port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        listen_socket("no.such.host.invalid", 0)
