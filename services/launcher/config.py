"""Options of ``quire serve`` beyond those of the processes it starts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config import option


@dataclass(frozen=True)
class LauncherConfig:
    gateways: int = option(1, "gateway processes", minimum=1, maximum=64)
    tokenizers: int = option(1, "tokenizer processes", minimum=1, maximum=64)
    start_timeout: float = option(600.0, "seconds the processes may take to become ready", minimum=1)
