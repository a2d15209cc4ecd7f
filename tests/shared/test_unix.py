"""Unix sockets: taken, left behind, and impossible."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.unix import unix_socket


def test_it_refuses_connections_until_somebody_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "http")
    with unix_socket(path) as sock, socket.socket(socket.AF_UNIX) as client:
        assert stat.S_ISSOCK(Path(path).stat().st_mode)
        with pytest.raises(ConnectionRefusedError):
            client.connect(path)
        sock.listen()
        client.connect(path)


def test_what_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "http")
    unix_socket(path).close()
    with unix_socket(path) as sock:
        assert sock.getsockname() == path


def test_a_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "http")
    with unix_socket(path) as sock:
        sock.listen()
        with pytest.raises(ConfigError, match=f"cannot listen on --uds {path}: Address already in use"):
            unix_socket(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"--uds .*notes.txt: Address already in use"):
        unix_socket(str(file))
    assert file.read_text() == "mine"


def test_a_path_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--uds /no/such/place: No such file or directory"):
        unix_socket("/no/such/place")
    with pytest.raises(ConfigError, match="AF_UNIX path too long"):
        unix_socket(str(tmp_path / ("x" * 200)))
