"""The base of all parsers: text in, pieces of channels out, each character decided as soon as its fate is certain.

A parser is a coroutine that takes one character at a time. So what it has given out after some text depends on that
text alone and never on how it was cut into tokens, and a marker cannot be seen in halves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from itertools import groupby

Piece = tuple[int, str]  # a channel (see shared.channels) and some of its text
Run = Generator[None, str, str]  # takes characters, ends with the first one it does not want, or END
END = ""  # what a coroutine is sent after the last character
MAX_SPACE = 16  # characters of white space that may belong to a marker behind them
TELLING = 3
"""Characters of a marker that text which breaks off hardly ends with by chance: ``<to`` of ``<tool_call>``."""


class Transducer(ABC):
    """One sequence's parser. ``_open`` has the characters that came in and are not decided, ``_last`` the latest."""

    def __init__(self) -> None:
        self._open = self._last = ""
        self._seen = 0  # characters that came in
        self._cut = False  # whether the text broke off before its end
        self._settled = False  # True: every character is decided the moment it comes
        self._pieces: list[Piece] = []
        self._channel, self._texts = -1, list[str]()  # the piece that grows
        self._program = self._run()
        next(self._program)

    @property
    def held(self) -> int:
        """Characters at the end of the text that are not decided."""
        return len(self._open)

    def feed(self, text: str) -> list[Piece]:
        """Takes the next characters; what is certain now."""
        for character in text:
            self._last = character
            self._seen += 1
            self._open += character
            self._program.send(character)
            if self._settled:
                self._open = ""
        return self._take()

    def finish(self, cut: bool = False) -> list[Piece]:
        """No more text comes: what is left is decided.

        cut: the model would have gone on, so what may be the beginning of a marker is taken for one, and not told.
        """
        self._last, self._cut = END, cut
        try:
            self._program.send(END)
        except StopIteration:
            pass
        else:
            raise RuntimeError(f"{type(self).__name__} wants text after the end")
        return self._take()

    @abstractmethod
    def _run(self) -> Run:
        """Gets every character and decides it; ends at END with nothing open."""

    def _take(self) -> list[Piece]:
        self._flush()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _flush(self) -> None:
        if self._texts:
            self._pieces.append((self._channel, "".join(self._texts)))
            self._texts = []

    # ---- deciding ----

    def _tell(self, channel: int, text: str) -> None:
        if channel != self._channel:
            self._flush()
            self._channel = channel
        if text:
            self._texts.append(text)

    def _release(self, channel: int, keep: int = 0) -> None:
        """Open text goes to ``channel``, but for its last ``keep`` characters."""
        count = len(self._open) - keep
        self._tell(channel, self._open[:count])
        self._open = self._open[count:]

    def _drop(self) -> None:
        self._open = ""

    def _begins(self, marker: str) -> bool:
        """Whether what is open may be the beginning of ``marker``."""
        begun = self._open.lstrip()
        return len(begun) >= TELLING and marker.startswith(begun)

    # ---- reading: each takes the current character and ends with the first that it does not want ----

    def _space(self, char: str) -> Run:
        while char.isspace():
            char = yield
        return char

    def _little_space(self, char: str) -> Run:
        """No more of it than a marker behind it may have."""
        while char.isspace() and len(self._open) <= MAX_SPACE:
            char = yield
        return char

    def _skip_space(self, char: str) -> Run:
        """Drops white space, and what is open before it."""
        while char.isspace():
            self._drop()
            char = yield
        return char

    def _match(self, marker: str, char: str) -> Generator[None, str, bool]:
        """Whether ``marker`` comes now; it is left open, and so is what came instead of it."""
        for place, wanted in enumerate(marker):
            if char != wanted:
                return False
            if place + 1 < len(marker):
                char = yield
        return True

    def _until(self, marker: str, channel: int, char: str) -> Generator[None, str, bool]:
        """Tells text on ``channel`` up to ``marker``, left open with the white space before it; False: none came."""
        while char != END:
            self._release(channel, _kept(self._open, marker))
            if self._open.endswith(marker):
                return True
            char = yield
        if self._cut and self._begins(marker):
            self._drop()
        return False


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same text with neighbours of one channel made one piece, and no empty ones."""
    runs = groupby(pieces, lambda piece: piece[0])
    texts = ((channel, "".join(text for _, text in run)) for channel, run in runs)
    return [(channel, text) for channel, text in texts if text]


def _kept(text: str, marker: str) -> int:
    """How many last characters of ``text`` are white space followed by a prefix of ``marker``, if only an empty one."""
    if len(text) == 1 and text != marker[0] and not text.isspace():
        return 0
    length = next(n for n in range(min(len(marker), len(text)), -1, -1) if text.endswith(marker[:n]))
    body = text[: len(text) - length]
    return length + min(len(body) - len(body.rstrip()), MAX_SPACE)
