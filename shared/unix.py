"""Unix sockets that programs of this host connect to."""

from __future__ import annotations

import errno
import os
import socket
import stat

from shared.errors import ConfigError


def unix_socket(path: str) -> socket.socket:
    """A bound stream socket at ``path``, where a file that a killed server left is replaced.

    Raises ConfigError when the address cannot be had.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == errno.ECONNREFUSED and stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}") from error
    return sock
