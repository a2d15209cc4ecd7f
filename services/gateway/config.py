"""Options of ``quire gateway``."""

from __future__ import annotations

from dataclasses import dataclass

from shared import options
from shared.config import option
from shared.errors import ConfigError


@dataclass(frozen=True)
class GatewayConfig:
    connect: str = options.connect()
    index: int = options.index()
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on", minimum=0, maximum=65535)
    uds: str = option("", "listen on a Unix socket at this path instead, for this host's own programs")
    fd: int = option(-1, "listen on this inherited socket instead (the launcher's)")
    api_key: list[str] = option([], "keys clients may present as 'Authorization: Bearer KEY'; none: open", secret=True)
    admin_api_key: list[str] = option([], "keys for /internal/...; none: those of --api-key do", secret=True)
    trust_tenant_header: bool = option(False, "take the tenant from the X-Tenant header, which a proxy in front sets")
    allowed_origins: list[str] = option(["*"], "origins that web pages may call from (CORS)")
    max_body_bytes: int = option(8 << 20, "largest request body", size=True, minimum=1024)
    served_model_name: list[str] = option([], "names clients may ask for, the shown one first; default: MODEL")
    shutdown_timeout: float = option(30.0, "seconds that open streams may take to finish after SIGTERM", minimum=0)
    accept_timeout: float = option(60.0, "seconds a request may wait for the tokenizer and scheduler", minimum=1)
    max_logprobs: int = option(20, "most likeliest tokens a request may ask the logprobs of", minimum=0)
    enable_force_include_usage: bool = option(False, "end every stream with its usage, and tell it in every chunk")
    sse_keep_alive_interval: float = option(
        15.0, "seconds of silence in a stream after which a comment shows that it lives; 0: never", minimum=0
    )
    disable_fastapi_docs: bool = option(False, "serve neither /openapi.json nor the page at /docs")
    access_log: bool = option(False, "log every HTTP request")
    cluster_key_file: str = options.cluster_key_file()
    insecure_tcp: bool = options.insecure_tcp()
    log_level: str = options.log_level()

    def __post_init__(self) -> None:
        for key in self.api_key:
            if not key.strip() or key != key.strip() or "," in key:
                raise ConfigError("--api-key: a key is empty, holds a comma, or has space around it")
