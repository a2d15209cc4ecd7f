"""``python -m kernels.cpu [isa ...]``: compiles the kernels into the package, for all instruction sets by default."""

from __future__ import annotations

import argparse
import sys

from kernels.cpu import build
from kernels.errors import UnavailableError


def main(args: list[str] | None = None) -> int:
    isas = {isa.name: isa for isa in build.ISAS}
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu", description="Compile the CPU kernels.")
    parser.add_argument("isa", nargs="*", help=f"which of {', '.join(isas)} (default: all)")
    for name in parser.parse_args(args).isa or isas:
        if name not in isas:
            parser.error(f"unknown instruction set {name!r}; there are {', '.join(isas)}")
        try:
            print(build.package(isas[name]))
        except UnavailableError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
