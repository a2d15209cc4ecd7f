"""``quire worker``."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

from services.worker.config import WorkerConfig
from services.worker.executor import Executor
from services.worker.service import WorkerService
from shared import log, options
from shared.config import describe, parse
from shared.errors import ConfigError
from shared.lifeline import Lifeline
from shared.metrics import Registry


def main(argv: Sequence[str]) -> int:
    config = parse(WorkerConfig, argv, prog="quire worker", about="Runs the model on one device.")
    if not config.connect:
        raise ConfigError("--connect is missing: the scheduler's address, ipc:///directory or tcp://host:port")
    log.configure(f"worker {config.index}", config.log_level)
    logging.getLogger(__name__).info("config: %s", describe(config))
    ending: list[WorkerService] = []

    def end(reason: str, code: int) -> None:
        if not ending:
            raise SystemExit(code)  # a signal while the model still loads
        ending[0].stop(reason, code)

    signal.signal(signal.SIGTERM, lambda *_: end("the server is shutting down", 0))
    line = Lifeline()
    if line.held:
        # Ctrl-C reaches the whole process group; the launcher then ends the others first, so that they can still tell
        # their clients why. The scheduler's GOODBYE, SIGTERM or the lifeline's end end this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGINT, lambda *_: end("the server is shutting down", 0))
    line.watch(lambda reason: logging.getLogger(__name__).info("the launcher ends the server: %s", reason))
    registry = Registry()
    executor = build_executor(config, registry)
    service = WorkerService(executor, config.index, config.connect, options.security(config), registry)
    ending.append(service)
    line.beat_from_thread()
    return service.run()


def build_executor(config: WorkerConfig, registry: Registry) -> Executor:
    if config.worker == "null":
        from services.worker.null import NullExecutor

        return NullExecutor.from_config(config)
    # libgomp reads this when torch loads it. Its threads spin at each barrier by default, which on cores shared with
    # other processes makes every operation wait for a time slice: steps were 40 times slower on two busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from services.worker.model_executor import ModelExecutor

    return ModelExecutor(config, registry)
