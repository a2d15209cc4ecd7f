"""Chat templates: the Jinja programs that models ship to turn a conversation into a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shared.errors import ConfigError, RequestError

_TAIL = "\0end of the final message\0"  # put behind the message that is to be continued, to find its end again


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; for serving it only has to be readable."""

    tags = {"generation"}  # noqa: RUF012  (declared mutable by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template, rendered in a sandbox with what Hugging Face templates may use.

    specials: ``bos_token``, ``eos_token`` and so on, as text.
    """

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._specials = dict(specials)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt. ``options`` are template variables, among them ``tools`` and ``add_generation_prompt``.

        continue_final_message leaves the last message open, so that the answer goes on from it. Raises RequestError
        (code ``chat_template_error``) with the template's own message when it refuses the conversation.
        """
        variables = {"tools": None, "documents": None, **self._specials, **options}
        if not variables.pop("continue_final_message", False):
            return self._render(messages, variables)
        if variables.get("add_generation_prompt"):
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        content = messages[-1].get("content") or ""
        if _TAIL in content:
            raise RequestError("the final message contains a reserved control sequence", param="messages")
        text = self._render([*messages[:-1], {**messages[-1], "content": content + _TAIL}], variables)
        head, found, _ = text.rpartition(_TAIL)
        if not found:
            raise RequestError(
                "the chat template does not show the final message, so it cannot be continued",
                code="chat_template_error",
                param="continue_final_message",
            )
        return head

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(messages=messages, **variables)
        except RecursionError as error:
            raise RequestError("the messages are nested too deeply", param="messages") from error
        except Exception as error:  # a template is a foreign program: whatever it raises is about this conversation
            raise RequestError(
                f"the chat template refuses these messages: {error}", code="chat_template_error", param="messages"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
