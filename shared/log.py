"""Logging: one line per record on stderr, with the time, the process and, where there is one, the request id."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def configure(process: str, level: str) -> None:
    """Sets up the root logger of this process; ``process`` is shown in each line, as ``scheduler`` or ``worker 0``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s {process}: %(message)s", datefmt="%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
