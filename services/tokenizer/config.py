"""Options of ``quire tokenizer``."""

from __future__ import annotations

from dataclasses import dataclass

from services.tokenizer.parsers.output import REASONING_PARSERS, TOOL_PARSERS
from shared import options
from shared.config import option


@dataclass(frozen=True)
class TokenizerConfig:
    model: str = options.model()
    connect: str = options.connect()
    index: int = options.index()
    download_dir: str = option("", "where models are kept; default: the user's cache")
    advertise: str = option("", "address gateways reach this process at, where it differs from the one it binds")
    bind: str = option("", "address to bind for gateways; default: a free one beside the scheduler's")
    chat_template: str = option("", "file with a Jinja chat template to use instead of the model's")
    tool_call_parser: str = option(
        "auto", "how the model writes tool calls; auto: told from its template", choices=("auto", "none", *TOOL_PARSERS)
    )
    reasoning_parser: str = option(
        "auto",
        "how it writes reasoning; auto: told from its template",
        choices=("auto", "none", *REASONING_PARSERS),
    )
    encode_threads: int = option(1, "threads that encode prompts beside the detokenizing loop", minimum=1, maximum=64)
    cluster_key_file: str = options.cluster_key_file()
    insecure_tcp: bool = options.insecure_tcp()
    log_level: str = options.log_level()
