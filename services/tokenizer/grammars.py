"""What outputs have to be: grammars, compiled and checked beside the event loop, in limited time, and remembered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.tokenizer.grammar_compiler import CPU_SECONDS, JSON_STYLE, OVERTIME
from shared.codec import pack, unpack
from shared.errors import RequestError
from shared.grammar import GrammarError, GrammarSpec
from shared.wire import Welcome

log = logging.getLogger(__name__)

PROCESSES = 2  # so that one hostile grammar does not hold up all others
MAX_WAITING = 256  # grammars that are compiled or wait for it
REMEMBERED = 1024  # grammars, good and bad
REMEMBERED_CHARS = 32 << 20  # of all of them together
WALL_SECONDS = 20.0  # for one grammar, on a machine that may be busy; the processor's time has a limit of its own
LOAD_SECONDS = 60.0  # for the vocabulary

Known = str | GrammarError


class _UnfinishedError(GrammarError):
    """It was not the grammar's own doing, as far as can be told: it may be tried again."""


def json_rule(schema: Mapping[str, Any]) -> str:
    """A JSON Schema as a piece of a Lark rule, written as everywhere."""
    return "%json " + json.dumps({"x-guidance": JSON_STYLE, **schema})


class Grammars:
    """Compiles what is new in processes of its own, started when they are first needed."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the model's."""
        self._folder = folder
        self._known: OrderedDict[tuple[str, str], Known] = OrderedDict()
        self._chars = 0
        self._pending: dict[tuple[str, str], asyncio.Task[Known]] = {}
        self._free: list[_Compiler] = []
        self._places = asyncio.Semaphore(PROCESSES)

    async def compile(self, spec: GrammarSpec, limits: Welcome) -> str:
        """llguidance's form of ``spec``, which is right and can be run. Requests that ask for the same share the work.

        Raises RequestError: 400, naming ``spec.param``, for what is wrong with it or takes too long; 503 when too many
        wait.
        """
        key = (spec.kind, spec.text)
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        else:
            known = await asyncio.shield(self._task(key, limits))
        if isinstance(known, GrammarError):
            raise RequestError(f"{spec.param}: {known}", code="invalid_value", param=spec.param)
        return known

    def close(self) -> None:
        for task in self._pending.values():
            task.cancel()
        for compiler in self._free:
            compiler.kill()
        self._free.clear()

    def _task(self, key: tuple[str, str], limits: Welcome) -> asyncio.Task[Known]:
        if key not in self._pending:
            if len(self._pending) >= MAX_WAITING:
                message = f"{len(self._pending)} grammars wait to be compiled, the limit"
                raise RequestError(message, status=503, code="overloaded", retry_after=1.0)
            task = asyncio.get_running_loop().create_task(self._compile(key, limits))
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        return self._pending[key]

    async def _compile(self, key: tuple[str, str], limits: Welcome) -> Known:
        async with self._places:
            compiler = self._free.pop() if self._free else _Compiler(self._folder, limits)
            try:
                known: Known = await compiler.compile(*key)
                self._free.append(compiler)
            except GrammarError as error:
                known = error
                if compiler.is_alive:
                    self._free.append(compiler)
                if isinstance(error, _UnfinishedError):
                    return known
            except BaseException:
                compiler.kill()
                raise
        self._remember(key, known)
        return known

    def _remember(self, key: tuple[str, str], known: Known) -> None:
        self._known[key] = known
        self._chars += _size(key, known)
        while len(self._known) > REMEMBERED or self._chars > REMEMBERED_CHARS:
            self._chars -= _size(*self._known.popitem(last=False))


class _Compiler:
    """One process of ``grammar_compiler``."""

    def __init__(self, folder: Path, limits: Welcome) -> None:
        self._arguments = [str(folder), str(limits.vocab_size), *map(str, limits.eos_ids)]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def compile(self, kind: str, text: str) -> str:
        """Raises GrammarError; the process is dead then if it is to blame."""
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.tokenizer.grammar_compiler", *self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            await self._answer(LOAD_SECONDS, "loading the vocabulary")
        body = pack([kind, text])
        assert self._process.stdin is not None
        self._process.stdin.write(len(body).to_bytes(4, "little") + body)
        return await self._answer(WALL_SECONDS, "compiling it")

    async def _answer(self, seconds: float, what: str) -> str:
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                size = int.from_bytes(await process.stdout.readexactly(4), "little")
                grammar, error = unpack(await process.stdout.readexactly(size))
        except TimeoutError:
            self.kill()
            raise _UnfinishedError(f"{what} took more than {seconds:g} s") from None
        except asyncio.IncompleteReadError:
            code = await process.wait()  # it has closed its end, so it is over; a kill could take its code from us
            if code == -OVERTIME:
                message = f"it is too complex: {what} took more than {CPU_SECONDS:g} s of processor time"
                raise GrammarError(message) from None
            log.warning("a grammar's compiler ended with code %d while %s", code, what)
            raise _UnfinishedError(f"{what} failed") from None
        if error:
            raise GrammarError(error)
        return str(grammar)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _size(key: tuple[str, str], known: Known) -> int:
    return len(key[1]) + (len(known) if isinstance(known, str) else 0)
