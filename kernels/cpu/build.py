"""Compiles the CPU kernels, one shared library per instruction set, and finds the one for this processor.

At install or image build, ``python -m kernels.cpu`` puts libraries for all instruction sets beside this module,
where any processor then finds its own. From a checkout, the one needed is compiled on first use into the user's
cache. Either way its name carries a hash of sources, flags and compiler, so that a changed source never meets an old
library.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kernels.errors import UnavailableError
from shared.errors import ConfigError
from shared.models.cache import cache_root, locked, new_file

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
PACKAGED = Path(__file__).parent / "lib"

# No -ffast-math: masks are infinities, and memory that is not read may hold NaN. No -march=native: a library must run
# on every processor that has the flags it is chosen by.
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp", "-fvisibility=hidden")

_TIMEOUT = 1800.0
"""Seconds for one file; it takes 20 on an idle core."""


@dataclass(frozen=True)
class Isa:
    """An instruction set: the compiler's flags for it, and what /proc/cpuinfo must list before it is used."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])

ISAS = (
    Isa("avx512bf16", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    Isa("avx512", ("-march=x86-64-v4",), _AVX512),
    Isa("avx2", ("-march=x86-64-v3",), _AVX2),
)
"""Best first."""


def supported(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[Isa]:
    """The instruction sets this processor has, best first."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    flags = frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
    return [isa for isa in ISAS if isa.needs <= flags]


def choose(environ: Mapping[str, str] = os.environ, cpuinfo: Path = Path("/proc/cpuinfo")) -> Isa:
    """The instruction set to use: the best one, or what KERNELS_CPU_ISA names.

    Raises UnavailableError when there is none, when KERNELS_CPU_ISA is none, or names one that this processor lacks.
    """
    found = supported(cpuinfo)
    wanted = environ.get("KERNELS_CPU_ISA", "")
    if wanted == "none":
        raise UnavailableError("KERNELS_CPU_ISA is none")
    if not found:
        raise UnavailableError("this processor has no AVX2")
    if not wanted:
        return found[0]
    for isa in found:
        if isa.name == wanted:
            return isa
    names = ", ".join([*(isa.name for isa in found), "none"])
    raise UnavailableError(f"KERNELS_CPU_ISA is {wanted}; this processor can do {names}")


def library(isa: Isa) -> Path:
    """The library for ``isa``, compiled now unless it is there. Raises UnavailableError when that is not possible."""
    packaged = PACKAGED / f"{isa.name}-{_digest(isa, '')}.so"
    if packaged.exists():
        return packaged
    compiler = _compiler()
    try:
        target = cache_root() / "kernels" / f"{isa.name}-{_digest(isa, _version(compiler))}.so"
        if target.exists():
            return target
        with locked(target):
            if not target.exists():
                log.warning("compiling CPU kernels for %s (once, about a minute)", isa.name)
                begin = time.monotonic()
                _compile(compiler, isa, target)
                log.info("compiled %s in %.0f s", target, time.monotonic() - begin)
    except (OSError, ConfigError) as error:
        raise UnavailableError(f"cannot keep compiled kernels: {error}") from error
    return target


def package(isa: Isa) -> Path:
    """The library for ``isa`` beside this module, compiled now unless it is there. Raises UnavailableError."""
    target = PACKAGED / f"{isa.name}-{_digest(isa, '')}.so"
    if not target.exists():
        PACKAGED.mkdir(exist_ok=True)
        _compile(_compiler(), isa, target)
    return target


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise UnavailableError("there is no g++ on the PATH (CXX names another compiler)")
    return compiler


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _digest(isa: Isa, compiler: str) -> str:
    """Of everything that decides what a library contains. compiler: "" for packaged ones, found without a compiler."""
    digest = hashlib.sha256(repr((FLAGS, isa.flags, compiler)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, isa: Isa, target: Path) -> None:
    with TemporaryDirectory() as folder:
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            commands = [
                [compiler, *FLAGS, *isa.flags, "-c", str(source), "-o", str(compiled)]
                for source, compiled in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        with new_file(target) as part:
            _run([compiler, *FLAGS, *isa.flags, "-shared", *map(str, objects), "-o", str(part)])


def _run(command: list[str]) -> str:
    """What the command prints. Raises UnavailableError when it fails or takes longer than _TIMEOUT."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"cannot compile: {error}") from error
    if result.returncode:
        raise UnavailableError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")
    return result.stdout
