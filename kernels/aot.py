"""Compiles every Triton kernel we ship for devices this machine does not have, and checks what came out.

    python -m kernels.aot

The launchers themselves say what to compile: they are called on tensors without memory, under a driver that only names
a device, and what Triton would compile there is caught at its cache hook. So signatures, divisibility hints and tiles
are those of a real launch. Compiling needs neither driver nor device; results stay in the user's cache.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels.triton as ops
from kernels.triton import tiles
from kernels.triton.attention import FEW_ROWS
from shared.models.cache import cache_root


@dataclass(frozen=True, slots=True)
class Target:
    """shared_limit: bytes of shared memory (LDS) a block may have."""

    name: str
    gpu: GPUTarget
    shared_limit: int


TARGETS = (
    Target("sm_80", GPUTarget("cuda", 80, 32), 99 * 1024),  # 163 KiB there, but the table serves sm_86 and sm_89 too
    Target("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024),
    Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a launcher. wide: must have 128-bit loads. tensor_cores: must multiply on them."""

    name: str
    call: Callable[[], object]
    wide: bool
    tensor_cores: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """What Triton was asked to compile. ``key`` is its specialization key: a new key is a new compile."""

    kernel: str
    key: str
    function: Any
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Report:
    case: str
    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    wide_loads: int
    multiply: str

    def problems(self, case: Case, target: Target) -> Iterator[str]:
        if self.spilled:
            yield f"spills {self.spilled} (bytes on NVIDIA, registers on AMD)"
        if self.shared > target.shared_limit:
            yield f"takes {self.shared} bytes of shared memory; the limit is {target.shared_limit}"
        if case.wide and self.kernel != "merge_kernel" and not self.wide_loads:
            yield "has no 128-bit loads"
        if case.tensor_cores and self.kernel != "merge_kernel" and self.multiply == "-":
            yield "does not multiply on tensor cores"


class _Driver:
    """Names a device, and has none."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_device(self) -> str:
        return self._target.name

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target.gpu


@contextmanager
def recorded(target: Target) -> Iterator[list[Launch]]:
    """Within it, kernels are not compiled or run: every launch is appended to the list instead."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted in this process, never compiled")
    launches: list[Launch] = []

    def catch(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launches.append(
            Launch(
                kernel=fn.name,
                key=f"{fn.name} {key}",
                function=fn.jit_function,
                signature=compile["signature"],
                constants=compile["constants"],
                attributes=compile["configs"][0],
                warps=compile["num_warps"],
                stages=compile["num_stages"],
            )
        )
        return True  # compiled elsewhere: Triton launches nothing

    before = triton.knobs.runtime.jit_cache_hook
    driver = triton.runtime.driver._active  # not .active, which looks for a device and raises where there is none
    triton.runtime.driver.set_active(_Driver(target))
    tiles.backend.cache_clear()
    triton.knobs.runtime.jit_cache_hook = catch
    try:
        yield launches
    finally:
        triton.knobs.runtime.jit_cache_hook = before
        triton.runtime.driver.set_active(driver)
        tiles.backend.cache_clear()


def cases() -> Iterator[Case]:
    """Every kernel, in every form in which the tile table differs."""
    half, single = torch.bfloat16, torch.float32
    yield _attention("bf16 D64 group 3", half, 64, group=3)  # SmolLM2-135M
    yield _attention("bf16 D80", half, 80)
    yield _attention("bf16 D128", half, 128)  # Llama 3 and Qwen3
    yield _attention("bf16 D128 window, cap", half, 128, window=1024, softcap=30.0)
    yield _attention("bf16 D256 group 16", half, 256, group=16)
    yield _attention("fp16 D128", torch.float16, 128)
    for head_dim in (64, 128, 256):
        yield _attention(f"fp32 D{head_dim}", single, head_dim)
    for name, dtype in (("bf16", half), ("fp32", single)):
        yield Case(f"{name} store", partial(_store, dtype), wide=True)
        yield Case(f"{name} rope", partial(_rope, dtype), wide=False)
        yield Case(f"{name} rows", partial(_rows, dtype), wide=True)
        yield Case(f"{name} sample", partial(_sample, dtype), wide=False)


def _attention(
    name: str, dtype: torch.dtype, head_dim: int, *, group: int = 4, window: int = 0, softcap: float = 0.0
) -> Case:
    def call() -> None:
        kv = _empty(512, 2, 8, 16, head_dim, dtype=dtype)
        table, lens, bounds = (_empty(*shape, dtype=torch.int32) for shape in ((2, 256), (2,), (3,)))
        ops.paged_decode(_empty(2, 8 * group, head_dim, dtype=dtype), kv, table, lens, 0.1, window, softcap)
        tokens = FEW_ROWS  # more than few rows of each KV head, so that both tiles are launched
        queries = _empty(tokens, 8 * group, head_dim, dtype=dtype)
        ops.paged_prefill(queries, kv, table, bounds, lens, 0.1, window, softcap)

    return Case(name, call, wide=True, tensor_cores=dtype != torch.float32)


def _store(dtype: torch.dtype) -> None:
    kv, rows = _empty(512, 2, 8, 16, 128, dtype=dtype), _empty(4, 8, 128, dtype=dtype)
    ops.store_kv(rows, rows, kv, _empty(4, dtype=torch.int64))
    ops.copy_blocks([kv], _empty(4, dtype=torch.int64), _empty(4, dtype=torch.int64))


def _rope(dtype: torch.dtype) -> None:
    qkv, cos_sin = _empty(4, 48, 128, dtype=dtype), _empty(4096, 128, dtype=torch.float32)
    positions = _empty(4, dtype=torch.int64)
    ops.rope(qkv[:, :40], cos_sin, positions)
    ops.rope_store(qkv, _empty(512, 2, 8, 16, 128, dtype=dtype), cos_sin, positions, positions)


def _rows(dtype: torch.dtype) -> None:
    rows, weight = _empty(4, 2560, dtype=dtype), _empty(2560, dtype=dtype)
    ops.rms_norm(rows, weight, 1e-6)
    ops.add_rms_norm(rows, rows, weight, 1e-6)
    ops.silu_mul(_empty(4, 2 * 9728, dtype=dtype))


def _sample(dtype: torch.dtype) -> None:
    real, whole = _empty(4, dtype=torch.float32), _empty(4, dtype=torch.int64)
    ops.sample(_empty(4, 151936, dtype=dtype), real, whole, real, real, whole, whole)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def build(launch: Launch, case: str, target: Target) -> Report:
    """Compiles one launch and reads its resources from the machine code."""
    source = ASTSource(launch.function, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(
        source, target=target.gpu, options={"num_warps": launch.warps, "num_stages": launch.stages}
    )
    if target.gpu.backend == "cuda":
        registers, spilled = _nvidia_registers(compiled.asm["cubin"])
        code = compiled.asm["ptx"]
        wide = len(re.findall(r"ld\.global\S*\.v4\.[bf]32|cp\.async\.cg\.shared\.global\s.*0x10", code))
        multiply = next((name for name in ("wgmma.mma_async", "mma.sync") if name in code), "-")
    else:
        code = compiled.asm["amdgcn"]
        registers = _largest(r"\.vgpr_count:\s*(\d+)", code)
        # scalar registers spill to vector registers, not to memory: not counted
        spilled = _largest(r"\.vgpr_spill_count:\s*(\d+)", code) + _largest(r";\s*ScratchSize:\s*(\d+)", code)
        wide = len(re.findall(r"(?:global|buffer)_load_dwordx4", code))
        multiply = "v_mfma" if "v_mfma" in code else "-"
    return Report(
        case, launch.kernel, target.name, registers, spilled, compiled.metadata.shared, wide, multiply.split(".mma_")[0]
    )


def _nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack and local memory, which is where spills go)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text!r}")
    return int(found[1]), int(found[2]) + int(found[3])


def _largest(pattern: str, text: str) -> int:
    return max((int(found) for found in re.findall(pattern, text)), default=0)


def check(targets: Iterable[Target] = TARGETS) -> tuple[list[Report], list[str]]:
    """Compiles everything. Returns the table and what is wrong with it, a line each."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_root() / f"triton-{triton.__version__}"))
    reports, problems = [], []
    for target in targets:
        seen = set()
        for case in cases():
            with recorded(target) as launches:
                case.call()
            for launch in launches:
                if launch.key in seen:
                    continue
                seen.add(launch.key)
                report = build(launch, case.name, target)
                reports.append(report)
                problems += [f"{case.name} {launch.kernel} {target.name} {p}" for p in report.problems(case, target)]
    return reports, problems


def main(args: list[str] | None = None) -> int:
    about = "Compile every Triton kernel for devices this machine does not have, and check what came out."
    argparse.ArgumentParser(prog="python -m kernels.aot", description=about).parse_args(args)
    reports, problems = check()
    print(f"{'case':22} {'kernel':20} {'target':7} {'regs':>5} {'spill':>6} {'shared':>7} {'ld128':>6} multiply")
    for r in reports:
        print(
            f"{r.case:22} {r.kernel:20} {r.target:7} {r.registers:5} {r.spilled:6} {r.shared:7} {r.wide_loads:6} "
            f"{r.multiply}"
        )
    print(f"{len(reports)} compiled with triton {triton.__version__}, {len(problems)} problems")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
