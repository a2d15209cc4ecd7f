"""Options that several processes take, each defined once (see ``shared.config``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.config import option
from shared.log import LEVELS
from shared.transport import ClusterKey, Security


def model() -> Any:
    return option(
        "",
        "a Hugging Face folder or hub id, or a .gguf file; none: the built-in SmolLM2-135M-Instruct",
        positional=True,
    )


def max_model_len() -> Any:
    return option(None, "longest prompt plus output, in tokens; the model's own limit when not given", minimum=1)


def block_size() -> Any:
    return option(
        16, "token slots of a KV block; a power of two for the CPU kernels' attention", minimum=1, maximum=256
    )


def connect() -> Any:
    return option("", "the scheduler's address: ipc:///directory or tcp://host:port")


def index() -> Any:
    return option(0, "this process's number among its role, for logs and metrics", minimum=0, maximum=9999)


def cluster_key_file() -> Any:
    return option("", "CURVE key that all processes of a deployment share; made if missing; needed for tcp addresses")


def insecure_tcp() -> Any:
    return option(False, "use tcp without encryption or authentication, on a network that is private itself")


def log_level() -> Any:
    return option("info", "least serious log records shown", choices=LEVELS)


def security(config: Any) -> Security:
    """The socket security that a config with ``cluster_key_file`` and ``insecure_tcp`` asks for."""
    key = ClusterKey.load(Path(config.cluster_key_file)) if config.cluster_key_file else None
    return Security(key, config.insecure_tcp)
