"""``quire chat``: a conversation in the terminal, or over pipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.offline.terminal import Screen, Session, TerminalConfig, run
from shared.config import option
from shared.errors import RequestError

ABOUT = "Talks to MODEL on a server of its own (whose options it takes), or to the one at --url."
HELP = """\
/system TEXT   the system prompt from now on; without TEXT, shows it
/clear         forgets the conversation
/exit          ends, as Ctrl-D does
Ctrl-C         stops an answer
"""


@dataclass(frozen=True)
class ChatConfig(TerminalConfig):
    system_prompt: str = option("", "what the model is told before the conversation")


def main(argv: Sequence[str]) -> int:
    """1 when an answer failed that nobody could see fail: with --quick or over pipes."""
    return run(ChatConfig, argv, _chat, prog="quire chat", about=ABOUT)


def _chat(config: ChatConfig, session: Session, screen: Screen) -> int:
    chat = Chat(config, session, screen)
    if config.quick:
        return 0 if chat.ask(config.quick) else 1
    screen.note(f"{session.model}; /help tells more\n")
    fine = True
    for line in screen.lines():
        text = line.strip()
        if text.startswith("/"):
            if not chat.obey(text):
                break
        elif text:
            fine = chat.ask(line) and fine
    return 0 if fine or screen.interactive else 1


class Chat:
    """A conversation and its commands."""

    def __init__(self, config: ChatConfig, session: Session, screen: Screen) -> None:
        self._session, self._screen, self._fields = session, screen, config.fields()
        self._system = config.system_prompt
        self._messages: list[dict[str, Any]] = []

    def obey(self, text: str) -> bool:
        """A line that begins with a slash. False: it ends the conversation."""
        name, _, rest = text.partition(" ")
        if name == "/exit":
            return False
        if name == "/clear":
            self._messages.clear()
        elif name == "/system":
            if rest.strip():
                self._system = rest.strip()
            else:
                self._screen.write((self._system or "no system prompt") + "\n")
        elif name == "/help":
            self._screen.write(HELP)
        else:
            self._screen.complain(f"{name} is no command; /help lists them")
        return True

    def ask(self, text: str) -> bool:
        """Streams the answer; what was said of it stays in the conversation, interrupted or not. False: refused."""
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {"messages": [*system, *self._messages], **self._fields}
        pieces: list[str] = []

        def show(choice: dict[str, Any]) -> None:
            delta = choice["delta"]
            if thought := delta.get("reasoning_content"):
                self._screen.note(thought)
            if piece := delta.get("content"):
                pieces.append(piece)
                self._screen.write(piece)
            if choice["finish_reason"] == "length":
                self._screen.note(" [cut off]")

        try:
            self._session.ask("/v1/chat/completions", body, show)
        except RequestError as error:
            if pieces:
                self._screen.write("\n")
            self._messages.pop()
            self._screen.complain(error.message)
            return False
        except KeyboardInterrupt:
            self._screen.note(" [stopped]")
        self._screen.write("\n")
        self._messages.append({"role": "assistant", "content": "".join(pieces)})
        return True
