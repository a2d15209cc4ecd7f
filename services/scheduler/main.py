"""``quire scheduler``."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from services.scheduler.config import SchedulerConfig
from services.scheduler.limits import parse_weights
from services.scheduler.service import SchedulerService
from shared import log
from shared.config import describe, parse
from shared.errors import ConfigError
from shared.lifeline import Lifeline

SHUTTING_DOWN = "the server is shutting down"


def main(argv: Sequence[str]) -> int:
    config = parse(SchedulerConfig, argv, prog="quire scheduler", about="The one owner of KV memory.")
    if not config.bind:
        raise ConfigError("--bind is missing: ipc:///directory or tcp://host:port")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {config.max_num_batched_tokens}, below --max-num-seqs "
            f"({config.max_num_seqs}): every running sequence needs one token a step"
        )
    parse_weights(config.tenant_weights)
    log.configure("scheduler", config.log_level)
    logging.getLogger(__name__).info("config: %s", describe(config))
    if config.bind.startswith("ipc:///"):
        Path(config.bind.removeprefix("ipc://")).mkdir(mode=0o700, parents=True, exist_ok=True)
    line = Lifeline()
    service = SchedulerService(config, line.beat)
    line.watch(lambda reason: service.stop(reason, 1))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop(SHUTTING_DOWN, 0))
    return service.run()
