"""Chat templates: the Jinja programs that models ship to turn a conversation into a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
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

    specials: ``bos_token``, ``eos_token`` and so on, as text. knows_tools: it shows the model the tools it may call.
    takes_parts: it goes through a message's content part by part, so content is a list of them. field: of a request,
    what an endless recursion is blamed on.
    """

    def __init__(self, source: str, specials: Mapping[str, str], field: str = "messages") -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            tree = environment.parse(source)
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(tree)
            self.takes_parts = _goes_through_content(tree)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._specials, self._field = dict(specials), field

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
        text = self._render([*messages[:-1], {**messages[-1], "content": _with_tail(messages[-1])}], variables)
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
        except MemoryError:
            raise
        except RecursionError as error:
            message = f"{self._field}: the chat template recurses too deeply"
            raise RequestError(message, code="chat_template_error", param=self._field) from error
        except Exception as error:  # a template is a foreign program: whatever it raises is about this conversation
            raise RequestError(
                f"the chat template refuses these messages: {error}", code="chat_template_error", param="messages"
            ) from error


def _with_tail(message: Mapping[str, Any]) -> str | list[Any]:
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    if _TAIL in parts[-1]["text"]:
        raise RequestError("the final message contains a reserved control sequence", param="messages")
    last = {**parts[-1], "text": parts[-1]["text"] + _TAIL}
    return last["text"] if isinstance(content, str) else [*parts[:-1], last]


def _goes_through_content(tree: jinja2.nodes.Template) -> bool:
    """Whether there is a loop over a message's ``content``, by that name or by one that it was given."""
    names = {"content"}

    def is_content(node: jinja2.nodes.Node | None) -> bool:
        if isinstance(node, jinja2.nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, jinja2.nodes.Getitem):
            return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
        if isinstance(node, jinja2.nodes.Filter):
            return is_content(node.node)
        return isinstance(node, jinja2.nodes.Name) and node.name in names

    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


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
