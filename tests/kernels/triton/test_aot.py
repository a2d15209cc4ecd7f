"""What is compiled without a device: resources of the tile table, and that serving asks for nothing new."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from kernels import aot
from kernels import triton as kernels
from kernels.triton import attention, fused, memory, sampling
from kernels.triton.tiles import Tile, decode_tile, prefill_tile
from kernels.triton.warmup import Shapes, warm_up

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

ROOT = Path(__file__).parents[3]
SMOLLM2 = Shapes(heads=9, hidden=576, intermediate=1536, vocab=49152, qk_norm=True)


@pytest.mark.timeout(900)
def test_every_kernel_compiles_within_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "kernels.aot"], cwd=ROOT, capture_output=True, text=True, timeout=880)
    with capsys.disabled():
        print("\n" + done.stdout)
    assert done.returncode == 0, done.stderr


def test_help_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        aot.main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m kernels.aot [-h]\n")


@pytest.mark.parametrize("target", aot.TARGETS, ids=lambda target: target.name)
def test_every_kernel_and_every_tile_is_among_what_is_compiled(target: aot.Target) -> None:
    with aot.recorded(target) as launches:
        for case in aot.cases():
            case.call()
        tiles = {
            choose(head_dim, dtype)
            for choose in (decode_tile, prefill_tile)
            for head_dim in range(8, 257, 8)
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        }
    modules = (attention, fused, memory, sampling)
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {launch.kernel for launch in launches} == kernels
    walks = [one for one in launches if one.kernel in ("decode_kernel", "prefill_kernel")]
    assert tiles == {Tile(constant(one, "ROWS"), constant(one, "TILE"), one.warps, one.stages) for one in walks}


def constant(launch: aot.Launch, name: str) -> int:
    value: int = launch.constants[(launch.function.arg_names.index(name),)]
    return value


@pytest.mark.parametrize("target", aot.TARGETS, ids=lambda target: target.name)
def test_serving_compiles_nothing_after_the_warm_up(target: aot.Target) -> None:
    """Every batch a server may form asks for specializations that the warm-up has asked for."""
    kv = torch.empty(64, 2, 3, 16, 64, dtype=torch.bfloat16)
    with aot.recorded(target) as warmed:
        warm_up(SMOLLM2, kv, windows=(0, 100))
    with aot.recorded(target) as served:
        for rows, width, window in product((1, 2, 15, 16, 17, 64), (1, 16, 17, 600), (0, 100, 16)):
            serve_step(kv, rows, width, window)
    assert len(served) > 1000
    assert {launch.key for launch in served} <= {launch.key for launch in warmed}


def serve_step(kv: torch.Tensor, rows: int, width: int, window: int) -> None:
    """What one step launches; index tensors lie at odd addresses, queries in a projection as wide as SmolLM2's.

    Its heads are normed besides, as Qwen3's are.
    """
    lens = torch.ones(rows + 1, dtype=torch.int32)[1:]
    table = torch.zeros(rows + 1, width, dtype=torch.int32)[1:]
    bounds = torch.arange(rows + 2, dtype=torch.int32)[1:]
    whole, real = torch.ones(rows + 1, dtype=torch.int64)[1:], torch.ones(rows + 1)[1:]
    hidden, cos_sin = torch.empty(rows, 576, dtype=torch.bfloat16), torch.empty(600 * 16, 64)
    weight = torch.empty(576, dtype=torch.bfloat16)
    qkv = torch.empty(rows, 15, 64, dtype=torch.bfloat16)
    kernels.rms_norm(hidden, weight, 1e-6)
    kernels.rms_norm(qkv[:, :9], weight[:64], 1e-6)
    kernels.rms_norm(qkv[:, :12], weight[:64], 1e-6)
    kernels.rope(qkv[:, :12], cos_sin, whole)
    kernels.store_kv(qkv[:, 9:12], qkv[:, 12:], kv, whole)
    kernels.rope_store(qkv, kv, cos_sin, whole, whole)
    kernels.paged_decode(qkv[:, :9], kv, table, lens, 0.125, window, 0.0)
    many = torch.empty(rows * 40, 15, 64, dtype=torch.bfloat16)
    kernels.paged_prefill(many[:, :9], kv, table, bounds, lens, 0.125, window, 0.0)
    kernels.paged_prefill(qkv[:, :9], kv, table, bounds, lens, 0.125, window, 0.0)
    kernels.add_rms_norm(hidden, hidden, weight, 1e-6)
    kernels.silu_mul(torch.empty(rows, 3072, dtype=torch.bfloat16))
    for dtype in (torch.bfloat16, torch.float32):  # float32 where some row has rules on its logits
        kernels.sample(torch.empty(rows, 49152, dtype=dtype), real, whole, real, real, whole, whole)
    kernels.copy_blocks([kv], whole, whole)


def test_a_shape_that_was_not_warmed_is_noticed() -> None:
    """The check above can fail: another head size is another specialization."""
    with aot.recorded(aot.TARGETS[0]) as warmed:
        warm_up(SMOLLM2, torch.empty(64, 2, 3, 16, 64, dtype=torch.bfloat16))
    with aot.recorded(aot.TARGETS[0]) as served:
        kernels.store_kv(*torch.empty(2, 1, 3, 80), torch.empty(8, 2, 3, 16, 80), torch.ones(1, dtype=torch.int64))
    assert served
    assert not {launch.key for launch in served} & {launch.key for launch in warmed}
