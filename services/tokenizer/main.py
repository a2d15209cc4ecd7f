"""``quire tokenizer``: text to tokens and back, for any number of gateways."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence

import uvloop

from services.tokenizer.config import TokenizerConfig
from services.tokenizer.service import Service
from services.tokenizer.tokenizer import Tokenizer
from shared import log, options
from shared.config import describe, parse
from shared.errors import ConfigError
from shared.lifeline import Lifeline
from shared.models import ModelFiles, locate
from shared.transport import Endpoint, Security

logger = logging.getLogger(__name__)
SHUTTING_DOWN = "the server is shutting down"


def main(argv: Sequence[str]) -> int:
    config = parse(TokenizerConfig, argv, prog="quire tokenizer", about="Turns text into tokens and tokens into text.")
    if not config.connect:
        raise ConfigError("--connect is missing: the scheduler's address, ipc:///directory or tcp://host:port")
    Endpoint(config.connect)
    log.configure(f"tokenizer {config.index}", config.log_level)
    logger.info("%s", describe(config))
    security = options.security(config)
    files = locate(config.model, download_dir=config.download_dir)
    tokenizer = Tokenizer.load(
        files.folder,
        config.chat_template,
        tool_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    logger.info("answers are parsed for %s", tokenizer.format)
    exit_code: int = uvloop.run(_serve(config, tokenizer, files, security))
    return exit_code


async def _serve(config: TokenizerConfig, tokenizer: Tokenizer, files: ModelFiles, security: Security) -> int:
    service = Service(config, tokenizer, files, security)
    loop = asyncio.get_running_loop()
    terminated = False

    def on_terminate() -> None:
        nonlocal terminated
        if terminated:
            service.stop(SHUTTING_DOWN)
        else:
            terminated = True
            service.drain()

    loop.add_signal_handler(signal.SIGTERM, on_terminate)
    loop.add_signal_handler(signal.SIGINT, service.stop, SHUTTING_DOWN)

    def on_reason(why: str) -> None:  # in the lifeline's thread
        loop.call_soon_threadsafe(service.stop, why, 1)

    line = Lifeline()
    line.watch(on_reason)
    line.beat_in(loop)
    return await service.run()
