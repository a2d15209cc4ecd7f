"""Chat templates that come with requests: programs of strangers, run in processes that the kernel holds to limits.

Jinja's sandbox keeps a template from reaching out, but not from looping for ever or from building gigabytes of text,
and a thread that does so cannot be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from services.tokenizer.chat import Conversation, render
from services.tokenizer.config import ChatSettings
from services.tokenizer.parsers.output import OutputFormat
from services.tokenizer.template import ChatTemplate
from shared.codec import pack, unpack
from shared.errors import ConfigError, RequestError, WireError
from shared.wire import ToolUse

PROCESSES = 2  # at a time
MAX_WAITING = 64
CPU_SECONDS = 2
WALL_SECONDS = 20.0  # on a machine that may be busy
MEMORY = 1 << 30  # of address space
MAX_CHARS = 16 << 20  # of a prompt


class ForeignTemplates:
    """Renders conversations with their own templates. specials, format, settings: as for the server's template."""

    def __init__(self, specials: Mapping[str, str], format: OutputFormat, settings: ChatSettings) -> None:
        self._trusted = settings.trusts_requests
        self._settings = [dict(specials), format.tools, list(astuple(settings))]
        self._places = asyncio.Semaphore(PROCESSES)
        self._waiting = 0

    async def render(self, conversation: Conversation) -> str:
        """The prompt. Raises RequestError: 400 for what the template is, does or costs, 503 when too many wait."""
        if not self._trusted:
            raise _refusal("this server runs no templates of requests; start it with --trust-request-chat-template")
        if self._waiting >= MAX_WAITING:
            message = f"{self._waiting} chat templates of requests wait to be rendered, the limit"
            raise RequestError(message, status=503, code="overloaded", retry_after=1.0)
        self._waiting += 1
        try:
            async with self._places:
                return await self._run(conversation)
        finally:
            self._waiting -= 1

    async def _run(self, conversation: Conversation) -> str:
        use = conversation.tools
        chat = [conversation.messages, dict(conversation.variables), use and list(astuple(use)), conversation.template]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.tokenizer.foreign_template", str(CPU_SECONDS), str(MEMORY)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(WALL_SECONDS):
                answer, _ = await process.communicate(pack([*self._settings, *chat]))
        except TimeoutError:
            raise _refusal(f"it took more than {WALL_SECONDS:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            code = await process.wait()
        if code == -signal.SIGXCPU:
            raise _refusal(f"it took more than {CPU_SECONDS} s of processor time")
        try:
            text, error = unpack(answer)
        except (WireError, ValueError):
            raise _refusal(f"it needed more than {MEMORY >> 20} MiB of memory") from None
        if error is not None:
            message, error_code, param = error
            raise RequestError(message, code=error_code, param=param)
        return str(text)


def _refusal(why: str) -> RequestError:
    return RequestError(f"chat_template: {why}", code="chat_template_error", param="chat_template")


def main(cpu_seconds: int, memory: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    specials, tools, settings, messages, variables, use, source = unpack(sys.stdin.buffer.read())
    try:
        conversation = Conversation(messages, variables, ToolUse(*use) if use is not None else None)
        text = render(_compiled(source, specials), conversation, OutputFormat(tools), ChatSettings(*settings))
        if len(text) > MAX_CHARS:
            raise _refusal(f"its prompt has {len(text)} characters, more than {MAX_CHARS}")
        answer: list[Any] = [text, None]
    except MemoryError:
        return 1
    except RequestError as error:
        answer = ["", [error.message, error.code, error.param]]
    sys.stdout.buffer.write(pack(answer))
    return 0


def _compiled(source: str, specials: dict[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(source, specials, "chat_template")
    except ConfigError as error:
        raise _refusal(str(error)) from error


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
