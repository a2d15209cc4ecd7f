"""Options of ``quire tokenizer``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.tokenizer.parsers.output import REASONING_PARSERS, TOOL_PARSERS
from shared import options
from shared.config import option
from shared.errors import ConfigError

CONTENT_FORMATS = ("auto", "string", "openai")
RESERVED_VARIABLES = ("messages", "tools")  # of templates: what requests have fields for


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What the operator says about chats.

    variables: of templates, where a request does not set them. content: one of CONTENT_FORMATS. auto_tools: models may
    call tools unasked. trusts_requests: requests may bring templates.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    content: str = "auto"
    auto_tools: bool = True
    trusts_requests: bool = False


@dataclass(frozen=True)
class TokenizerConfig:
    model: str = options.model()
    connect: str = options.connect()
    index: int = options.index()
    download_dir: str = option("", "where models are kept; default: the user's cache")
    advertise: str = option("", "address gateways reach this process at, where it differs from the one it binds")
    bind: str = option("", "address to bind for gateways; default: a free one beside the scheduler's")
    chat_template: str = option("", "Jinja chat template to use instead of the model's, or a file with one")
    chat_template_content_format: str = option(
        "auto",
        "whether templates get a message's content as a string or as OpenAI's parts; auto: told from the template",
        choices=CONTENT_FORMATS,
    )
    default_chat_template_kwargs: str = option("{}", "JSON object of template variables, where requests set none")
    trust_request_chat_template: bool = option(False, "run chat templates that come with requests")
    enable_auto_tool_choice: bool = option(True, "let models decide for themselves whether to call tools")
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

    @property
    def chat(self) -> ChatSettings:
        """Raises ConfigError for template variables that are none."""
        try:
            variables = json.loads(self.default_chat_template_kwargs)
        except ValueError as error:
            raise ConfigError(f"--default-chat-template-kwargs is not JSON: {error}") from error
        if not isinstance(variables, dict):
            raise ConfigError("--default-chat-template-kwargs is not a JSON object")
        for name in RESERVED_VARIABLES:
            if name in variables:
                raise ConfigError(f"--default-chat-template-kwargs: {name} cannot be a template variable")
        return ChatSettings(
            variables, self.chat_template_content_format, self.enable_auto_tool_choice, self.trust_request_chat_template
        )

    def __post_init__(self) -> None:
        _ = self.chat
