"""Sockets as this protocol uses them: ROUTERs that report lost peers, DEALERs with an identity, optional CURVE.

Senders never block: they pass DONTWAIT, and count the EAGAIN of a full queue and the EHOSTUNREACH of a peer that is
gone. Streams are loss-safe (offsets and RESUME), so they go on.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator

from shared.errors import ConfigError

HIGH_WATER_MARK = 100_000  # messages a peer may leave unread before sends to it fail
MAX_MESSAGE_BYTES = 256 << 20
IPC_PATH_LIMIT = 107  # bytes of a Unix socket's path
LAST_WORD_MS = 500  # how long a closing socket may hold its last message
ZAP_DOMAIN = "quire"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The scheduler's one well-known address, from which both of its sockets' addresses follow.

    ``ipc:///dir`` holds the sockets ``clients`` and ``workers``; ``tcp://host:port`` uses port and port + 1.
    """

    base: str

    def __post_init__(self) -> None:
        parts = urlsplit(self.base)
        if parts.scheme == "ipc" and self.base.startswith("ipc:///"):
            return
        try:
            if parts.scheme == "tcp" and parts.hostname and parts.port and parts.port < 65535:
                return
        except ValueError:
            pass
        raise ConfigError(f"address {self.base!r} is neither ipc:///directory nor tcp://host:port")

    @property
    def is_tcp(self) -> bool:
        return self.base.startswith("tcp:")

    @property
    def clients(self) -> str:
        return self.base if self.is_tcp else f"{self.base}/clients"

    @property
    def workers(self) -> str:
        parts = urlsplit(self.base)
        if not self.is_tcp or parts.port is None:
            return f"{self.base}/workers"
        return f"tcp://{_bracket(parts.hostname or '')}:{parts.port + 1}"


def check_connectable(address: str) -> None:
    """Raises ConfigError for what no socket can connect to. Resolves no name and touches no file."""
    parts = urlsplit(address)
    if parts.scheme == "ipc" and address.startswith("ipc:///"):
        size = len(os.fsencode(address.removeprefix("ipc://")))
        if size > IPC_PATH_LIMIT:
            raise ConfigError(f"address {address!r}: its path is {size} bytes long, the limit is {IPC_PATH_LIMIT}")
        return
    with contextlib.suppress(ValueError):
        if parts.scheme == "tcp" and parts.hostname not in (None, "*") and parts.port and not parts.path:
            return
    raise ConfigError(f"address {address!r} is neither ipc:///path nor tcp://host:port")


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """One CURVE key pair for a deployment: whoever holds it may join, nobody else may."""

    public: bytes
    secret: bytes

    @classmethod
    def load(cls, path: Path) -> ClusterKey:
        """Reads the secret (Z85, 40 characters), or makes one readable by its owner only if the file is missing.

        Processes of a deployment may all start at once on an empty folder: the file appears whole, and the first wins.
        """
        if not path.exists():
            try:
                with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as part:
                    part.write(zmq.curve_keypair()[1])
                    part.flush()
                    with contextlib.suppress(FileExistsError):
                        os.link(part.name, path)
            except OSError as error:
                raise ConfigError(f"cluster key file {path}: {error.strerror}") from error
        secret = path.read_bytes().strip()
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"cluster key file {path} can be read by others; chmod 600 it")
        try:
            return cls(zmq.curve_public(secret), secret)
        except (ValueError, zmq.ZMQError) as error:
            raise ConfigError(f"cluster key file {path} does not hold a 40-character Z85 key") from error


@dataclass(frozen=True, slots=True)
class Security:
    """What tcp sockets do: CURVE with ``key``, or plain when the operator said so. ipc needs neither."""

    key: ClusterKey | None = None
    insecure_tcp: bool = False

    def check(self, address: str) -> None:
        if address.startswith("tcp:") and self.key is None and not self.insecure_tcp:
            raise ConfigError(
                f"{address} is tcp: give --cluster-key-file, or --insecure-tcp if the network itself is private"
            )


def _prepare(sock: Any, address: str, security: Security) -> None:
    security.check(address)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if address.startswith("tcp:"):
        sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if security.key is not None:
            sock.curve_publickey = security.key.public
            sock.curve_secretkey = security.key.secret


def bind_router(context: Any, address: str, security: Security) -> tuple[Any, str]:
    """A bound ROUTER (from a plain or asyncio context) and its real address (a tcp port of 0 is filled in)."""
    sock = context.socket(zmq.ROUTER)
    try:
        _prepare(sock, address, security)
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if address.startswith("tcp:") and security.key is not None:
            sock.curve_server = True
            sock.zap_domain = ZAP_DOMAIN.encode()
        sock.bind(address)
    except zmq.ZMQError as error:
        sock.close(0)
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    except ConfigError:
        sock.close(0)
        raise
    return sock, sock.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()


def connect_dealer(context: Any, identity: bytes, address: str, security: Security) -> Any:
    sock = context.socket(zmq.DEALER)
    try:
        _prepare(sock, address, security)
        sock.setsockopt(zmq.IDENTITY, identity)
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if address.startswith("tcp:") and security.key is not None:
            sock.curve_serverkey = security.key.public
        sock.connect(address)
    except zmq.ZMQError as error:
        sock.close(0)
        raise ConfigError(f"cannot connect to {address}: {error}") from error
    except ConfigError:
        sock.close(0)
        raise
    return sock


def start_zap(context: Any, security: Security) -> Any:
    """Starts the thread that lets only holders of the cluster key in; call before binding. None when not needed."""
    if security.key is None:
        return None
    authenticator = ThreadAuthenticator(context)
    authenticator.start()

    class OnlyUs:
        def callback(self, domain: str, key: bytes) -> bool:
            return security.key is not None and hmac.compare_digest(key, security.key.public)

    authenticator.configure_curve_callback(ZAP_DOMAIN, OnlyUs())
    return authenticator


def own_address_towards(address: str) -> str:
    """This host's IP address on the route to ``tcp://host:port`` (nothing is sent)."""
    parts = urlsplit(address)
    host = "127.0.0.1" if parts.hostname in (None, "*", "0.0.0.0") else str(parts.hostname)
    family, _, _, _, target = socket.getaddrinfo(host, parts.port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return _bracket(str(probe.getsockname()[0]))


def _bracket(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host
