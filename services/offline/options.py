"""Command lines of programs that use a server: one that runs already, or one of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from services.gateway.config import GatewayConfig
from services.launcher.config import LauncherConfig
from services.offline.client import Address
from services.offline.server import PrivateServer, ServerError
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import TokenizerConfig
from services.worker.config import WorkerConfig
from shared import models
from shared.config import option, parse_many, secret_env, to_argv
from shared.errors import ConfigError

C = TypeVar("C")
SERVER = (LauncherConfig, GatewayConfig, TokenizerConfig, SchedulerConfig, WorkerConfig)
NOT_HERE = frozenset({"advertise", "bind", "connect", "fd", "host", "index", "port", "uds"})


def url_option() -> Any:
    return option("", "use the server at this address, such as http://127.0.0.1:8000; none: start one for this command")


@dataclass(frozen=True)
class ServerChoice:
    """Which server a command uses. argv, env: of one of its own, ``url`` being empty then."""

    url: str
    api_key: str
    argv: list[str]
    env: dict[str, str]
    model: str
    download_dir: str

    @contextmanager
    def address(self) -> Iterator[Address]:
        """Where it answers, for the block; a server of its own is ready by then and gone afterwards.

        Raises ConfigError and ServerError as ``PrivateServer.wait_ready``.
        """
        if self.url:
            yield Address(self.url.rstrip("/").removesuffix("/v1"), "", self.api_key)
            return
        models.locate(self.model, download_dir=self.download_dir, progress=True)  # here, where its progress is seen
        server = PrivateServer(self.argv, self.env)
        try:
            server.wait_ready()
            address = Address("http://quire", server.uds, self.api_key)
            try:
                yield address
            except ServerError as error:
                raise server.explained(error) from error
        finally:
            server.close()


def parse(cls: type[C], argv: Sequence[str], *, prog: str, about: str) -> tuple[C, ServerChoice]:
    """The options of ``cls``, which has ``url``, and all of ``quire serve`` beside it. Raises ConfigError."""
    own, *configs = parse_many([cls, *SERVER], argv, prog=prog, about=about, hidden=NOT_HERE)
    if own.url:  # an environment that is set up for a server too is no mistake
        typed = _argv(parse_many([cls, *SERVER], argv, {}, prog=prog, about=about, hidden=NOT_HERE)[1:])
        if typed:
            raise ConfigError(f"{typed[0]}: an option of a server that is started, but --url names one that runs")
    gateway, worker = configs[1], configs[4]
    env = {name: value for config in configs for name, value in secret_env(config).items()}
    api_key = next(iter(gateway.api_key), "")
    return own, ServerChoice(own.url, api_key, _argv(configs), env, worker.model, worker.download_dir)


def _argv(configs: Sequence[Any]) -> list[str]:
    """Several processes take the same option; the server wants it once."""
    return list(dict.fromkeys(word for config in configs for word in to_argv(config)))
