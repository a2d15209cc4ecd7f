"""``quire serve``: a whole server on this host."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from services.gateway.config import GatewayConfig
from services.launcher.config import LauncherConfig
from services.launcher.launcher import Launcher, ServerConfig, listen_socket
from services.launcher.rundir import RunDir
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig
from shared import models, options
from shared.config import parse_many
from shared.log import configure
from shared.transport import Endpoint
from shared.unix import unix_socket

log = logging.getLogger(__name__)

SET_HERE = frozenset({"advertise", "connect", "fd", "index"})  # the launcher's to choose for each child
ABOUT = "Starts gateways, tokenizers, the scheduler and workers on this host and serves MODEL over HTTP."


def main(argv: Sequence[str]) -> int:
    classes = [LauncherConfig, GatewayConfig, TokenizerConfig, SchedulerConfig, WorkerConfig]
    config = ServerConfig(*parse_many(classes, argv, prog="quire serve", about=ABOUT, hidden=SET_HERE))
    configure("launcher", config.gateway.log_level)
    if config.scheduler.bind:
        options.security(config.scheduler).check(Endpoint(config.scheduler.bind).clients)
    # Fetched and checked here, once and with a progress bar, before any port is bound or process started.
    files = models.locate(config.worker.model, download_dir=config.worker.download_dir, progress=True)
    log.info("model %s in %s", files.name, files.folder)
    rundir = RunDir()
    try:
        base = config.scheduler.bind or f"ipc://{rundir.path}"
        with _listen(config.gateway) as sock:
            if sock.family != socket.AF_UNIX:
                port = sock.getsockname()[1]
                config = replace(config, gateway=replace(config.gateway, port=port))
            try:
                code: int = uvloop.run(_run(config, sock, base))
                return code
            finally:
                if config.gateway.uds:
                    Path(config.gateway.uds).unlink(missing_ok=True)
    finally:
        rundir.close()


def _listen(config: GatewayConfig) -> socket.socket:
    if not config.uds:
        return listen_socket(config.host, config.port)
    sock = unix_socket(config.uds)
    sock.set_inheritable(True)
    return sock


async def _run(config: ServerConfig, sock: socket.socket, base: str) -> int:
    return await Launcher(config, sock, base).run()
