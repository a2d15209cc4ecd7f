"""Grammars of new requests are built beside the loop: a large one takes a second, and no step waits for it."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from services.scheduler.grammar import Grammar
from shared.grammar import GrammarError, load_vocabulary, new_matcher
from shared.wire import Memory, SubmitTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

REMEMBERED = 256  # grammars
REMEMBERED_SECONDS = 4.0  # that all of them took to build: what takes long to build takes much memory
USES = 1000  # of one that is remembered, whose users share an automaton that grows with what they meet

Built = tuple[bytes, SubmitTokens, Grammar | GrammarError]


class Grammars:
    """A thread that builds them, in the order in which they are asked for. ``wake`` is called when one is ready."""

    def __init__(self, model: str, download_dir: str, wake: Callable[[], None]) -> None:
        """``model``: whose vocabulary it is, as in ``locate``. It is loaded for the first grammar."""
        self._model, self._download_dir, self._wake = model, download_dir, wake
        self._asked: queue.SimpleQueue[tuple[bytes, SubmitTokens, Memory] | None] = queue.SimpleQueue()
        self._built: queue.SimpleQueue[Built] = queue.SimpleQueue()
        self._rids: set[int] = set()  # asked for and not taken yet
        self._thread: threading.Thread | None = None

    def ask(self, owner: bytes, message: SubmitTokens, memory: Memory) -> None:
        """Builds the grammar of a request; not twice for one that is submitted again meanwhile."""
        if message.rid in self._rids:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        self._rids.add(message.rid)
        self._asked.put((owner, message, memory))

    def take(self) -> list[Built]:
        """What is ready: who asked, the request, and its grammar or why there is none."""
        ready: list[Built] = []
        with contextlib.suppress(queue.Empty):
            while True:
                ready.append(self._built.get_nowait())
        self._rids -= {message.rid for _, message, _ in ready}
        return ready

    def close(self) -> None:
        """Ends the thread after what it does just now, which nobody waits for."""
        self._asked.put(None)

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        shelf: _Shelf | None = None
        while (asked := self._asked.get()) is not None:
            owner, message, memory = asked
            try:
                shelf = shelf or _Shelf(self._load(memory))
                built: Grammar | GrammarError = Grammar(shelf.matcher(message.grammar))
            except GrammarError as error:
                built = error
            except Exception as error:  # the thread has to live on for the others
                log.exception("request %s: while its grammar was built", message.request_id)
                built = GrammarError(f"{type(error).__name__}: {error}")
            self._built.put((owner, message, built))
            self._wake()

    def _load(self, memory: Memory) -> LLTokenizer:
        from shared.models import locate  # brings the tokenizers library, which only this thread may need

        files = locate(self._model, download_dir=self._download_dir)
        if memory.model_digest not in ("", files.digest):
            raise GrammarError(f"the scheduler was started with {files.name}, the workers with {memory.model_name}")
        begin = time.perf_counter()
        vocabulary = load_vocabulary(files.folder, memory.vocab_size, memory.eos_ids)
        log.info("vocabulary for grammars loaded in %.1f s", time.perf_counter() - begin)
        return vocabulary


class _Shelf:
    """Matchers by grammar, at their beginnings, of which requests get copies. Copies share what was built."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        self._kept: OrderedDict[str, tuple[LLMatcher, float, int]] = OrderedDict()  # and seconds it took, uses left
        self._seconds = 0.0

    def matcher(self, grammar: str) -> LLMatcher:
        """Raises GrammarError."""
        matcher, seconds, uses = self._kept.pop(grammar) if grammar in self._kept else (*self._build(grammar), USES)
        if uses > 1:
            self._kept[grammar] = (matcher, seconds, uses - 1)
        else:
            self._seconds -= seconds
        while len(self._kept) > REMEMBERED or (self._seconds > REMEMBERED_SECONDS and len(self._kept) > 1):
            _, (_, oldest, _) = self._kept.popitem(last=False)
            self._seconds -= oldest
        return matcher.deep_copy()

    def _build(self, grammar: str) -> tuple[LLMatcher, float]:
        begin = time.thread_time()
        matcher = new_matcher(self._vocabulary, grammar)
        seconds = time.thread_time() - begin
        self._seconds += seconds
        return matcher, seconds
