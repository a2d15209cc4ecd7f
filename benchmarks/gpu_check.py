"""Everything on a GPU: right first, then how fast, with the shapes of two models and random weights.

    python benchmarks/gpu_check.py

Correctness is against float64, the reference and transformers. Times are beside torch's scaled_dot_product_attention on
KV already gathered (so without the price of gathering) and beside the floor: bytes that must be read over the measured
memory bandwidth, or for prefill the operations over the measured rate of large matrix products.

Each section runs in a process of its own, as a GPU is lost to the process that it failed in, and the others go on.
Takes less than six minutes; exits with 1 when anything is wrong and with 2 when there is no GPU. ``--device cpu
--tiny`` runs the same code in Triton's interpreter on small shapes, to see that the script works; its times mean
nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

LIMIT = 350.0  # seconds in all


@dataclass(frozen=True)
class Run:
    device: str
    tiny: bool
    left: float
    """Seconds this section may take."""
    folder: Path


def correctness(run: Run) -> int:
    import torch

    from benchmarks.gpu.correctness import TOLERANCE, Checks, check_attention, check_rest
    from benchmarks.gpu.shapes import OTHERS, QWEN3, SMOLLM2, TINY

    checks, device = Checks(), torch.device(run.device)
    lengths, chunks = ([1, 17, 0, 40], [1, 9]) if run.tiny else ([1, 15, 16, 17, 300, 0, 1100, 5000], [1, 7, 600, 130])
    for shape in (TINY,) if run.tiny else (SMOLLM2, QWEN3, *OTHERS):
        for dtype in (torch.bfloat16,) if run.tiny else TOLERANCE:
            check_attention(shape, dtype, device, lengths, chunks, checks)
    check_rest(device, 1000 if run.tiny else QWEN3.vocab, 16 if run.tiny else 256, checks)
    return checks.failed


def decode(run: Run) -> int:
    """bf16, cold memory, random blocks, in a CUDA graph."""
    import torch

    from benchmarks.gpu.shapes import QWEN3, SMOLLM2, TINY
    from benchmarks.gpu.timing import Timer, time_decode

    timer = Timer(torch.device(run.device))
    read = timer.bandwidth()
    print(f"  memory read {read / 1e9:.0f} GB/s")
    cases = ((1, 1024), (1, 16384), (8, 4096), (32, 512), (32, 4096), (128, 2048), (256, 1024))
    for shape in (TINY,) if run.tiny else (SMOLLM2, QWEN3):
        for rows, context in ((2, 40),) if run.tiny else cases:
            time_decode(shape, rows, context, timer, read)
    return 0


def prefill(run: Run) -> int:
    import torch

    from benchmarks.gpu.shapes import QWEN3, SMOLLM2, TINY
    from benchmarks.gpu.timing import Timer, time_prefill

    timer = Timer(torch.device(run.device))
    operations = timer.rate()
    print(f"  bf16 products {operations / 1e12:.0f} TFLOP/s")
    for shape in (TINY,) if run.tiny else (SMOLLM2, QWEN3):
        for new, context in ((4, 30),) if run.tiny else ((512, 0), (2048, 0), (8192, 0), (512, 7680)):
            time_prefill(shape, new, context, timer, operations)
    return 0


def worker(run: Run) -> int:
    """The worker's executor: graphs, steps launched ahead, swaps."""
    import dataclasses

    import torch

    from benchmarks.gpu.correctness import Checks
    from benchmarks.gpu.shapes import SMOLLM2, TINY
    from benchmarks.gpu.worker import check_steps

    checks = Checks()
    shape = dataclasses.replace(TINY, layers=1) if run.tiny else SMOLLM2
    batches, tokens = ((1, 3), 4) if run.tiny else ((1, 3, 8), 24)
    check_steps(run.folder / "worker", shape, torch.device(run.device), batches, tokens, checks)
    return checks.failed


def steps(run: Run) -> int:
    """Whole steps, with CUDA graphs and without, and KV sized by a trial of the largest ones."""
    import dataclasses

    import torch

    from benchmarks.gpu.shapes import QWEN3, SMOLLM2, TINY
    from benchmarks.gpu.worker import time_steps

    device = torch.device(run.device)
    if run.tiny:
        time_steps(run.folder / "steps", dataclasses.replace(TINY, layers=1), device, [2], [3], 3, 2)
        return 0
    for shape in (SMOLLM2, QWEN3):
        time_steps(run.folder / shape.name, shape, device, [1, 8, 32, 128], [512, 2048], 1024, 24)
    return 0


def server(run: Run) -> int:
    """``quire serve`` on the device, over HTTP."""
    import dataclasses

    import torch

    from benchmarks.gpu.correctness import Checks
    from benchmarks.gpu.shapes import SMOLLM2, TINY
    from benchmarks.gpu.worker import check_server

    checks = Checks()
    shape = dataclasses.replace(TINY, layers=1) if run.tiny else dataclasses.replace(SMOLLM2, layers=6, vocab=2048)
    check_server(run.folder / "server", shape, torch.device(run.device), 3 if run.tiny else 24, run.left, checks)
    return checks.failed


SECTIONS: dict[str, Callable[[Run], int]] = {
    section.__name__: section for section in (correctness, worker, server, decode, prefill, steps)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--section", choices=SECTIONS, action="append", help="only this one; may be given again")
    parser.add_argument("--inside", action="store_true", help="in this process, not in one a section")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check needs a GPU, and torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    import triton

    if options.device == "cuda" and triton.knobs.runtime.interpret:
        print("gpu_check measures compiled kernels: unset TRITON_INTERPRET", file=sys.stderr)
        return 2
    begin, failed = time.monotonic(), []
    name = torch.cuda.get_device_name() if options.device == "cuda" else "Triton's interpreter"
    if not options.inside:
        print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    for section in options.section or SECTIONS:
        left = LIMIT - (time.monotonic() - begin)
        right = inside(section, options, left) if options.inside else outside(section, options, left)
        if not right:
            failed.append(section)
    if not options.inside:
        print(f"{time.monotonic() - begin:.0f} s; " + (f"FAILED: {', '.join(failed)}" if failed else "all is right"))
    return 1 if failed else 0


def inside(section: str, options: argparse.Namespace, left: float) -> bool:
    import torch

    torch.manual_seed(0)
    print(f"{section}: {(SECTIONS[section].__doc__ or 'bf16').strip()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return SECTIONS[section](Run(options.device, options.tiny, left, Path(folder))) == 0
        except Exception:
            traceback.print_exc(file=sys.stdout)
            return False


def outside(section: str, options: argparse.Namespace, left: float) -> bool:
    command = [sys.executable, __file__, "--inside", "--section", section, "--device", options.device]
    try:
        return subprocess.run([*command, *["--tiny"] * options.tiny], timeout=max(left, 1), check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"  FAIL {section}: not over after {left:.0f} s", flush=True)
        return False


if __name__ == "__main__":
    sys.exit(main())
