"""The ``quire`` command: one subcommand per process, each imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from shared.errors import ConfigError

COMMANDS = {
    "serve": ("services.launcher.main", "start a whole server on this host"),
    "gateway": ("services.gateway.main", "HTTP front end"),
    "tokenizer": ("services.tokenizer.main", "text to tokens and back"),
    "scheduler": ("services.scheduler.main", "the one owner of KV memory"),
    "worker": ("services.worker.main", "runs the model"),
    "run-batch": ("services.offline.batch", "answer a file of requests in OpenAI's batch format"),
    "chat": ("services.offline.chat", "talk to a model in the terminal"),
    "complete": ("services.offline.complete", "have texts continued in the terminal"),
    "bench": ("services.worker.bench", "bench step: where the time of a step goes"),
    "fetch": ("services.fetch", "download and convert a model without serving it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand's ``main(argv) -> exit code``. Operator mistakes become one line and exit code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        lines = (f"  {name:<10} {about}" for name, (_, about) in COMMANDS.items())
        print("usage: quire COMMAND [options]\n\n" + "\n".join(lines) + "\n\nquire COMMAND --help tells its options")
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(version("quire-serving"))
        return 0
    if args[0] not in COMMANDS:
        print(f"quire: unknown command {args[0]!r}; one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[args[0]][0]).main(args[1:]))
    except ConfigError as error:
        print(f"quire {args[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
