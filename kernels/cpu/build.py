"""Compiles the CPU kernels, one shared library per instruction set, and finds the one for this processor.

At install or image build, ``python -m kernels.cpu`` puts libraries for all instruction sets beside this module,
where any processor then finds its own. From a checkout, the one needed is compiled on first use into the user's
cache. Either way its name carries a hash of sources and flags, and in the cache one of the compiler, so that a changed
source never meets an old library; and its own hash lies beside it, so that a damaged one is never loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
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
    # Every processor with bf16 products has those of int8 (VNNI) too.
    Isa("avx512bf16", ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"), _AVX512 | {"avx512_bf16", "avx512_vnni"}),
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

    Raises UnavailableError when there is none, when KERNELS_CPU_ISA is none, or names one that this processor lacks;
    ConfigError when it names one that does not exist.
    """
    found = supported(cpuinfo)
    wanted = environ.get("KERNELS_CPU_ISA", "")
    known = [*(isa.name for isa in ISAS), "none"]
    if wanted and wanted not in known:
        raise ConfigError(f"KERNELS_CPU_ISA is {wanted!r}, not one of {', '.join(known)}")
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
    packaged = PACKAGED / f"{_name(isa)}.so"
    if _whole(packaged):
        return packaged
    try:
        folder = cache_root() / "kernels"
        try:
            compiler = _compiler()
        except UnavailableError:
            # What another compiler made of the same sources is as good.
            made = next((path for path in sorted(folder.glob(f"{_name(isa)}-*.so")) if _whole(path)), None)
            if made is None:
                raise
            return made
        target = folder / f"{_name(isa)}-{_version(compiler)}.so"
        if _whole(target):
            return target
        with locked(target):
            if not _whole(target):
                why = f": {target} is damaged" if target.exists() else ""
                log.warning("compiling CPU kernels for %s (once, about a minute)%s", isa.name, why)
                begin = time.monotonic()
                _compile(compiler, isa, target)
                log.info("compiled %s in %.0f s", target, time.monotonic() - begin)
    except (OSError, ConfigError) as error:
        raise UnavailableError(f"cannot keep compiled kernels: {error}") from error
    return target


def package(isa: Isa) -> Path:
    """The library for ``isa`` beside this module, compiled now unless it is there. Raises UnavailableError."""
    target = PACKAGED / f"{_name(isa)}.so"
    if not _whole(target):
        PACKAGED.mkdir(exist_ok=True)
        _compile(_compiler(), isa, target)
    return target


def _compiler() -> list[str]:
    """The command, its program as a path: g++, or what CXX says, which may have arguments (``ccache g++``)."""
    try:
        program, *arguments = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    except ValueError as error:
        raise UnavailableError(f"CXX is {os.environ['CXX']!r}: {error}") from error
    found = shutil.which(program)
    if found is None:
        raise UnavailableError(f"there is no {program} on the PATH (CXX names another compiler)")
    return [found, *arguments]


def _name(isa: Isa) -> str:
    """Of a library without the compiler's part: a packaged one, and in the cache any compiler's, needs none to be
    found."""
    digest = hashlib.sha256(repr((FLAGS, isa.flags)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return f"{isa.name}-{digest.hexdigest()[:16]}"


def _version(compiler: list[str]) -> str:
    """A hash of what the compiler says it is, and of its arguments."""
    text = repr((_run([*compiler, "--version"]), compiler[1:]))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _whole(target: Path) -> bool:
    """Whether this is the library that was compiled. Loading any other file may end the process (SIGBUS) or worse."""
    try:
        return hashlib.sha256(target.read_bytes()).hexdigest() == _checksum(target).read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _checksum(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _compile(compiler: list[str], isa: Isa, target: Path) -> None:
    with TemporaryDirectory() as folder:
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            commands = [
                [*compiler, *FLAGS, *isa.flags, "-c", str(source), "-o", str(compiled)]
                for source, compiled in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        with new_file(target) as part:
            _run([*compiler, *FLAGS, *isa.flags, "-shared", *map(str, objects), "-o", str(part)])
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)  # a file cannot take its place
            _checksum(target).write_text(hashlib.sha256(part.read_bytes()).hexdigest())


def _run(command: list[str]) -> str:
    """What the command prints. Raises UnavailableError when it fails or takes longer than _TIMEOUT."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"cannot compile: {error}") from error
    if result.returncode:
        raise UnavailableError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")
    return result.stdout
