"""The death pipe: how a child learns that its launcher is gone, and why the launcher ends it.

The launcher holds the write end and every child the read end. The kernel closes the write end when the launcher dies,
however it dies, and the child's blocking read returns: no polling, no orphan. Before an orderly end the launcher may
write one line, the reason, which open streams then carry as their error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

ENV = "QUIRE_LIFELINE_FD"


def watch(on_reason: Callable[[str], None], environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Starts the watching thread if this process has a lifeline.

    on_reason is called in that thread with each line written by the launcher. At end of file the process ends at
    once: its launcher is dead, and there is nobody left to drain for.
    """
    fd = environ.pop(ENV, None)
    if fd is None:
        return
    stream = os.fdopen(int(fd), "rb", buffering=0)

    def run() -> None:
        pending = b""
        while chunk := stream.read(4096):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                on_reason(line.decode(errors="replace"))
        os._exit(1)

    threading.Thread(target=run, name="lifeline", daemon=True).start()
