"""Which library is chosen, and how it is compiled: once, whole, and never for a processor that cannot run it."""

from __future__ import annotations

import ctypes
import logging
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.cpu import build
from kernels.cpu.__main__ import main
from kernels.errors import UnavailableError
from kernels.ops import select
from shared.errors import ConfigError

ROOT = Path(__file__).parents[3]
AVX2 = "fpu sse4_2 abm avx avx2 bmi1 bmi2 f16c fma movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
CPU = torch.device("cpu")


def cpuinfo(folder: Path, flags: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    return path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse4_2 avx", []),
        (AVX2.replace(" fma", ""), []),
        (AVX2, ["avx2"]),
        (AVX512.replace(" avx512vl", ""), ["avx2"]),
        (f"{AVX2} avx512f avx512_bf16", ["avx2"]),
        (AVX512, ["avx512", "avx2"]),
        (f"{AVX512} avx512_bf16 amx_bf16", ["avx512", "avx2"]),
        (f"{AVX512} avx512_bf16 avx512_vnni", ["avx512bf16", "avx512", "avx2"]),
    ],
)
def test_only_what_the_processor_has(tmp_path: Path, flags: str, expected: list[str]) -> None:
    assert [isa.name for isa in build.supported(cpuinfo(tmp_path, flags))] == expected


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.parametrize("isa", build.ISAS, ids=lambda isa: isa.name)
def test_no_library_has_instructions_that_its_processors_may_lack(isa: build.Isa) -> None:
    """The compiler's own word for what it may use, in the words of /proc/cpuinfo; what AVX2 implies is left out."""
    command = ["g++", *isa.flags, "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    used = {line.split()[1].strip("_").lower() for line in macros.splitlines()}
    extensions = {"avx", "bmi", "f16c", "fma", "lzcnt", "movbe", "amx", "sha", "aes", "pclmul", "gfni", "vaes", "xop"}
    names = {"bmi": "bmi1", "lzcnt": "abm", "avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni"}
    found = {names.get(name, name) for name in used if name.rstrip("0123456789") in extensions or "avx512" in name}
    assert {"avx2", "fma", "f16c"} <= found
    assert found <= isa.needs


def test_a_machine_without_cpuinfo_has_nothing(tmp_path: Path) -> None:
    assert build.supported(tmp_path / "missing") == []


def test_the_best_is_chosen_and_another_can_be_asked_for(tmp_path: Path) -> None:
    info = cpuinfo(tmp_path, AVX512)
    assert build.choose({}, info).name == "avx512"
    assert build.choose({"KERNELS_CPU_ISA": "avx2"}, info).name == "avx2"
    with pytest.raises(
        UnavailableError, match="KERNELS_CPU_ISA is avx512bf16; this processor can do avx512, avx2, none"
    ):
        build.choose({"KERNELS_CPU_ISA": "avx512bf16"}, info)
    with pytest.raises(UnavailableError, match="KERNELS_CPU_ISA is none"):
        build.choose({"KERNELS_CPU_ISA": "none"}, info)


@pytest.mark.parametrize("flags", ["fpu", AVX512])
def test_a_name_that_no_instruction_set_has_is_refused(tmp_path: Path, flags: str) -> None:
    with pytest.raises(ConfigError, match="KERNELS_CPU_ISA is 'avx', not one of avx512bf16, avx512, avx2, none"):
        build.choose({"KERNELS_CPU_ISA": "avx"}, cpuinfo(tmp_path, flags))


def small(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> build.Isa:
    """Sources of one small file, and a cache of their own."""
    sources = folder / "src"
    sources.mkdir(exist_ok=True)
    (sources / "one.cpp").write_text(source)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "PACKAGED", folder / "packaged")
    monkeypatch.setenv("QUIRE_CACHE", str(folder / "cache"))
    return build.ISAS[-1]


def test_compiled_once_and_again_when_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    isa = small(monkeypatch, tmp_path, "int one() { return 1; }")
    first = build.library(isa)
    made = first.stat().st_mtime_ns
    assert build.library(isa) == first and first.stat().st_mtime_ns == made
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "compiling CPU kernels for avx2 (once, about a minute)"
    ]
    small(monkeypatch, tmp_path, "int one() { return 2; }")
    assert build.library(isa) != first
    leftovers = {p.suffix for p in first.parent.iterdir()}
    assert leftovers == {".so", ".sha256", ".lock"}


def test_processes_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa, log, compiler = small(monkeypatch, tmp_path, "int one() { return 1; }"), tmp_path / "log", tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(3) as pool:  # the lock is of open files, so threads meet at it as processes do
        libraries = [one.result() for one in [pool.submit(build.library, isa) for _ in range(3)]]
    assert len(set(libraries)) == 1 and libraries[0].exists()
    assert sum("-shared" in line for line in log.read_text().splitlines()) == 1


@pytest.mark.parametrize("damage", ["empty", "truncated", "another library", "a folder", "no checksum"])
@pytest.mark.parametrize("packaged", [False, True])
def test_a_damaged_library_is_compiled_again(
    damage: str, packaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    isa = small(monkeypatch, tmp_path, 'extern "C" __attribute__((visibility("default"))) int one() { return 1; }')
    make = build.package if packaged else build.library
    path = make(isa)
    whole = path.read_bytes()
    if damage == "no checksum":
        path.with_suffix(".sha256").unlink()
    else:
        path.unlink()
    if damage == "a folder":
        (path / "inner").mkdir(parents=True)
    elif damage == "another library":
        shutil.copy(torch._C.__file__, path)
    elif damage != "no checksum":
        path.write_bytes(whole[: len(whole) // 2 if damage == "truncated" else 0])
    caplog.clear()
    assert make(isa) == path
    assert ctypes.CDLL(str(path)).one() == 1
    if not packaged:
        (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert message == f"compiling CPU kernels for avx2 (once, about a minute): {path} is damaged"
    made = path.stat().st_mtime_ns
    assert make(isa) == path and path.stat().st_mtime_ns == made


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = small(monkeypatch, tmp_path, "int one() { return 1; }")
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(UnavailableError, match=r"CXX is \"g\+\+ '\": No closing quotation"):
        build.library(isa)
    monkeypatch.delenv("CXX")
    plain = build.library(isa)
    monkeypatch.setenv("CXX", "env LANG=C g++")
    assert build.library(isa) != plain  # arguments may change what it contains


def test_without_a_compiler_what_one_made_before_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = small(monkeypatch, tmp_path, "int one() { return 1; }")
    made = build.library(isa)
    monkeypatch.setenv("PATH", "")
    assert build.library(isa) == made
    made.write_bytes(b"")
    with pytest.raises(UnavailableError, match=r"there is no g\+\+ on the PATH"):
        build.library(isa)


def test_packaged_libraries_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = small(monkeypatch, tmp_path, "int one() { return 1; }")
    assert main([isa.name]) == 0
    monkeypatch.setenv("PATH", "")
    assert build.library(isa).parent == build.PACKAGED
    assert not (tmp_path / "cache").exists()
    small(monkeypatch, tmp_path, "int one() { return 2; }")  # a library of other sources is not taken
    with pytest.raises(UnavailableError, match=r"there is no g\+\+ on the PATH"):
        build.library(isa)


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = small(monkeypatch, tmp_path, "int one() { return 1; }")
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UnavailableError, match="cannot keep compiled kernels: cannot make"):
        build.library(isa)


def test_an_error_of_the_compiler_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = small(monkeypatch, tmp_path, "int one() { return nothing; }")
    with pytest.raises(UnavailableError, match=r"nothing.* was not declared"):
        build.library(isa)
    assert not list((tmp_path / "cache" / "kernels").glob("*.so"))
    assert main([isa.name]) == 1


@pytest.mark.parametrize("lacking", ["KERNELS_CPU_ISA is none", "there is no g++ on the PATH"])
def test_without_kernels_the_reference_serves_and_says_so(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if lacking.startswith("KERNELS_CPU_ISA"):
        monkeypatch.setenv("KERNELS_CPU_ISA", "none")
    elif build.supported():
        monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(build, "PACKAGED", tmp_path)
    else:
        pytest.skip("there are no kernels for this processor")
    assert select(CPU).name == "reference"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"no native CPU kernels, the slower torch ones run instead: {lacking}")
    with pytest.raises(UnavailableError, match=re.escape(lacking)):
        select(CPU, "cpu")


def test_a_library_that_cannot_be_loaded_leaves_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not build.supported():
        pytest.skip("there are no kernels for this processor")
    small(monkeypatch, tmp_path, "int missing(); int one() { return missing(); }")  # as one whose libgomp is gone
    monkeypatch.delenv("KERNELS_CPU_ISA", raising=False)
    assert select(CPU).name == "reference"
    *_, message = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "no native CPU kernels, the slower torch ones run instead: cannot load compiled kernels: "
    )
    with pytest.raises(UnavailableError, match=r"cannot load compiled kernels: .*undefined symbol"):
        select(CPU, "cpu")


def test_a_misspelt_instruction_set_does_not_leave_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELS_CPU_ISA", "avx")
    with pytest.raises(ConfigError, match="KERNELS_CPU_ISA is 'avx'"):
        select(CPU)


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend 'xpu' is none of auto, reference, cpu, triton"):
        select(CPU, "xpu")


def test_the_library_shares_torchs_openmp() -> None:
    """One OpenMP runtime in the process, or torch and the kernels would fight for the cores."""
    try:
        build.library(build.choose())
    except UnavailableError as error:
        pytest.skip(str(error))
    script = (
        "from kernels.cpu import load; load()\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "1", done.stderr
