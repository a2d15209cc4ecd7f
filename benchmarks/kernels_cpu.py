"""CPU kernels against what torch offers and what the memory allows, as ratios measured in one run.

    python benchmarks/kernels_cpu.py [--threads N] [--seconds S] [PART ...]

Every figure is the least of many repeats of each call, rivals taken in turn, so that a busy machine disturbs both
alike. Where there is a floor, the line says whether the ratio holds it; the exit status is 1 when one does not.
Memory is cold: each call uses the next of several layers, together larger than any cache.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as workers have it: threads that spin ruin figures on busy cores

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.cpu import CpuKernels, build, load
from kernels.kv import quantized
from kernels.quantized import to_int4, to_int8
from services.scheduler.block_pool import BlockPool

Call = Callable[[], object]
Memory = Callable[[Sequence[int], int], torch.Tensor]

# SmolLM2-135M, the model whose shapes are measured.
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
LINEARS = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
VOCABULARY = 49152
LAYERS = 8
RESERVED = 8192  # tokens that a sequence of a mapped contiguous cache may grow to


@dataclass
class Report:
    below: int = 0
    seconds: float = 2.0

    def race(self, rivals: dict[str, Sequence[Call]]) -> dict[str, float]:
        """Microseconds of a call of each rival: per call its least time, then the median over the calls."""
        best = {name: [float("inf")] * len(calls) for name, calls in rivals.items()}
        end = time.monotonic() + self.seconds
        rounds = 0
        while rounds < 3 or time.monotonic() < end:
            rounds += 1
            for name, calls in rivals.items():
                for i, call in enumerate(calls):
                    begin = time.perf_counter()
                    call()
                    best[name][i] = min(best[name][i], time.perf_counter() - begin)
        return {name: sorted(times)[len(times) // 2] * 1e6 for name, times in best.items()}

    def ratio(self, what: str, value: float, floor: float | None = None, note: str = "") -> None:
        mark = ""
        if floor is not None:
            mark = f"  floor {floor:.2f} {'held' if value >= floor else 'NOT HELD'}"
            self.below += value < floor
        print(f"{what:<74} {value:6.2f}{mark}{'  ' + note if note else ''}", flush=True)


@dataclass
class Decode:
    """A batch of equal sequences, with keys and values of several layers."""

    table: torch.Tensor
    kvs: list[torch.Tensor]
    q: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def build(cls, sequences: int, length: int, block_size: int, order: str, memory: Memory) -> Decode:
        table = ORDERS[order](sequences, -(-length // block_size))
        shape = (int(table.max()) + 1, 2, KV_HEADS, block_size, HEAD_DIM)
        kvs = [memory(shape, length) for _ in range(LAYERS)]
        q = torch.randn(sequences, HEADS, HEAD_DIM).bfloat16()
        return cls(table, kvs, q, torch.full((sequences,), length, dtype=torch.int32))

    @property
    def bytes(self) -> int:
        kv = self.kvs[0]
        return 2 * int(self.lens.sum()) * KV_HEADS * kv.shape[4] * kv.element_size()

    def calls(self, decode: Callable[..., torch.Tensor]) -> list[Call]:
        return [
            lambda kv=kv: decode(self.q, kv, self.table, self.lens, HEAD_DIM**-0.5, 0, 0.0)  # type: ignore[misc]
            for kv in self.kvs
        ]

    def torch_forms(self) -> dict[str, list[Call]]:
        """Gathering by the block table, then attention in torch, two ways."""
        sequences, flat = len(self.lens), self.table.flatten().long()
        length = int(self.lens[0])

        def gathered(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            picked = kv.index_select(0, flat).view(sequences, -1, 2, KV_HEADS, kv.shape[3], HEAD_DIM)
            k, v = picked.unbind(2)
            shape = (sequences, KV_HEADS, -1, HEAD_DIM)
            return k.transpose(1, 2).reshape(shape)[:, :, :length], v.transpose(1, 2).reshape(shape)[:, :, :length]

        def sdpa(kv: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.q.unsqueeze(2), *gathered(kv), enable_gqa=True)

        def products(kv: torch.Tensor) -> torch.Tensor:
            k, v = gathered(kv)
            q = self.q.view(sequences, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
            weights = (q @ k.transpose(2, 3)).float().mul_(HEAD_DIM**-0.5).softmax(-1)
            return weights.to(v.dtype) @ v

        return {
            "gather + SDPA": [lambda kv=kv: sdpa(kv) for kv in self.kvs],  # type: ignore[misc]
            "gather + two products": [lambda kv=kv: products(kv) for kv in self.kvs],  # type: ignore[misc]
            "the reference": self.calls(reference.paged_decode),
        }


def random_blocks(sequences: int, per_sequence: int) -> torch.Tensor:
    return (torch.randperm(sequences * per_sequence) + 1).int().view(sequences, -1)


def consecutive_blocks(sequences: int, per_sequence: int) -> torch.Tensor:
    return torch.arange(1, sequences * per_sequence + 1).int().view(sequences, -1)


def turned_over_blocks(sequences: int, per_sequence: int) -> torch.Tensor:
    """As the scheduler's pool gives them after ten turnovers by sequences that begin with a prompt, grow block by block
    beside each other and end at random. A fifth of the pool is free."""
    generator = torch.Generator().manual_seed(0)

    def random(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=generator))

    pool = BlockPool(sequences * per_sequence * 5 // 4 + 1)
    live: list[list[int]] = []
    taken = 0

    def grow(blocks: list[int], count: int) -> None:
        blocks += pool.allocate(count, "sequence", "benchmark", after=blocks[-1] if blocks else 0)

    def end() -> None:
        pool.release(live.pop(random(0, len(live) - 1)), "sequence")

    while taken < 10 * pool.num_usable:
        while len(live) >= sequences or pool.num_free < per_sequence:
            end()
        live.append([])
        grow(live[-1], random(1, per_sequence // 2))
        for blocks in live:
            if len(blocks) < per_sequence and pool.num_free:
                grow(blocks, 1)
                taken += 1
    live += [[] for _ in range(sequences - len(live))]
    while any(len(blocks) < per_sequence for blocks in live):
        for blocks in live:
            if len(blocks) < per_sequence:
                grow(blocks, min(per_sequence - len(blocks), random(1, per_sequence // 4) if not blocks else 1))
    return torch.tensor(live).int()


ORDERS = {"random": random_blocks, "consecutive": consecutive_blocks, "turned over": turned_over_blocks}


def plain_memory(shape: Sequence[int], length: int) -> torch.Tensor:
    return torch.randn(tuple(shape)).bfloat16()


def int8_memory(shape: Sequence[int], length: int) -> torch.Tensor:
    return quantized(torch.randn(tuple(shape)))


def mapped_memory(shape: Sequence[int], length: int) -> torch.Tensor:
    """Address space that gets its pages when they are written, as vAttention keeps contiguous KV: a block is all that
    a sequence may ever hold, of which only ``length`` tokens have memory."""
    elements = math.prod(shape)
    memory = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.bfloat16, count=elements).view(tuple(shape))
    tensor[..., :length, :] = torch.randn(*shape[:3], length, shape[4])
    return tensor


def decode(kernels: CpuKernels, report: Report) -> None:
    for order in ("random", "consecutive"):
        batch = Decode.build(32, 512, 16, order, plain_memory)
        words = [kv.view(torch.int32).flatten() for kv in batch.kvs]
        rivals = {"ours": batch.calls(kernels.paged_decode), **batch.torch_forms()}
        rivals["read"] = [lambda x=x: x.view(torch.float32).sum() for x in words]  # type: ignore[misc]
        us = report.race(rivals)
        bandwidth = batch.bytes / us["ours"] / 1e3
        read = words[0].numel() * 4 / us["read"] / 1e3
        name = f"decode, 32 x 512 tokens, bf16, cold, {order} blocks"
        torch_best = min((us[form], form) for form in batch.torch_forms())
        report.ratio(f"{name}: {torch_best[1]} / ours", torch_best[0] / us["ours"], 3.5, f"{us['ours']:.0f} us")
        floor = 0.6 if order == "consecutive" else None
        report.ratio(f"{name}: share of read bandwidth", bandwidth / read, floor, f"{bandwidth:.1f} of {read:.1f} GB/s")


def int8(kernels: CpuKernels, report: Report) -> None:
    """Keys and values of 68 bytes a row instead of 128."""
    for order in ("random", "turned over", "consecutive"):
        batches = {
            "bf16": Decode.build(32, 512, 16, order, plain_memory),
            "int8": Decode.build(32, 512, 16, order, int8_memory),
        }
        us = report.race({name: batch.calls(kernels.paged_decode) for name, batch in batches.items()})
        note = ", ".join(f"{name} {us[name]:.0f} us {batches[name].bytes / us[name] / 1e3:.1f} GB/s" for name in us)
        name = f"int8 KV, decode, 32 x 512 tokens, cold, {order} blocks: bf16 / int8"
        report.ratio(name, us["bf16"] / us["int8"], 1.0 if order == "consecutive" else None, note)
    prompts = {"bf16": Prefill.build(1024, 16, "random", plain_memory)}
    prompts["int8"] = Prefill.build(1024, 16, "random", int8_memory)
    us = report.race({name: [lambda p=p: p.run(kernels)] for name, p in prompts.items()})  # type: ignore[misc]
    note = ", ".join(f"{name} {us[name]:.0f} us" for name in us)
    report.ratio("int8 KV, prefill of 1024: bf16 / int8", us["bf16"] / us["int8"], None, note)


def paging(kernels: CpuKernels, report: Report) -> None:
    """The price of paging. PagedAttention's paper gives 20 to 26 % for its own kernel against a contiguous one."""
    length = 512
    batches = {
        order: Decode.build(32, length, 16, order, plain_memory) for order in ("random", "turned over", "consecutive")
    }
    # A block as long as the sequence is contiguous KV, walked by the same kernel.
    batches["contiguous"] = Decode.build(32, length, length, "consecutive", plain_memory)
    batches["contiguous, mapped on demand"] = Decode.build(32, length, RESERVED, "consecutive", mapped_memory)
    us = report.race({name: batch.calls(kernels.paged_decode) for name, batch in batches.items()})
    for name in batches:
        report.ratio(
            f"price of paging, decode: {name} / contiguous", us[name] / us["contiguous"], None, f"{us[name]:.0f} us"
        )
    for tokens in (1024, 2048):
        prompts = {order: Prefill.build(tokens, 16, order, plain_memory) for order in ORDERS}
        prompts["contiguous"] = Prefill.build(tokens, tokens, "consecutive", plain_memory)
        prompts["contiguous, mapped on demand"] = Prefill.build(tokens, RESERVED, "consecutive", mapped_memory)
        us = report.race({name: [lambda p=p: p.run(kernels)] for name, p in prompts.items()})  # type: ignore[misc]
        for name in prompts:
            report.ratio(
                f"price of paging, prefill of {tokens}: {name} / contiguous",
                us[name] / us["contiguous"],
                None,
                f"{us[name]:.0f} us",
            )


@dataclass
class Prefill:
    kv: torch.Tensor
    table: torch.Tensor
    q: torch.Tensor
    bounds: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def build(cls, tokens: int, block_size: int, order: str, memory: Memory) -> Prefill:
        table = ORDERS[order](8, -(-tokens // block_size))  # the prompt is one of eight in its memory
        kv = memory((int(table.max()) + 1, 2, KV_HEADS, block_size, HEAD_DIM), tokens)
        q = torch.randn(tokens, HEADS, HEAD_DIM).bfloat16()
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        return cls(kv, table[:1], q, bounds, bounds[1:].clone())

    def run(self, kernels: CpuKernels) -> torch.Tensor:
        return kernels.paged_prefill(self.q, self.kv, self.table, self.bounds, self.lens, HEAD_DIM**-0.5, 0, 0.0)


def prefill(kernels: CpuKernels, report: Report) -> None:
    for tokens in (1024, 2048):
        prompt = Prefill.build(tokens, 16, "random", plain_memory)
        k, v = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM).bfloat16()
        q = prompt.q.transpose(0, 1).unsqueeze(0)
        us = report.race(
            {
                "ours": [lambda prompt=prompt: prompt.run(kernels)],  # type: ignore[misc]
                "sdpa": [
                    lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                ],  # type: ignore[misc]
            }
        )
        rate = 2 * tokens * tokens * HEAD_DIM * HEADS / us["ours"] / 1e3
        name = f"prefill, {tokens} tokens, bf16: SDPA on gathered KV / ours"
        report.ratio(name, us["sdpa"] / us["ours"], 1.8, f"{us['ours']:.0f} us, {rate:.0f} GFLOP/s")


def linear(kernels: CpuKernels, report: Report) -> None:
    """bf16 against oneDNN over weights it packed for that number of rows, and against plain_gemm.cpp."""
    plain = PlainGemm()
    read = read_bandwidth(report)
    for name, (outputs, inputs) in LINEARS.items():
        for rows in (1, 8, 32, 128, 512):
            # Enough layers that weights are cold where that matters; long calls need repeats more.
            layers = max(1, (24 if rows <= 32 else 3) * 576 * 3072 // max(outputs * inputs, 576 * 3072))
            weights = [(torch.randn(outputs, inputs) * 0.02).bfloat16() for _ in range(layers)]
            x = torch.randn(rows, inputs).bfloat16()
            rivals = {"ours": [lambda f=f, x=x: f(x) for f in map(kernels.linear, weights)]}  # type: ignore[misc]
            rivals["oneDNN prepacked"] = [
                lambda w=w, x=x: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")  # type: ignore[misc]
                for w in (torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights)
            ]
            if plain.found:
                rivals["the plain product"] = [plain.call(weight, x) for weight in weights]
            us = report.race(rivals)
            best = min((us[rival], rival) for rival in us if rival != "ours")
            flops, size = 2 * rows * outputs * inputs, 2 * outputs * inputs
            note = f"{us['ours']:.0f} us, {flops / us['ours'] / 1e3:.0f} GFLOP/s, {size / us['ours'] / 1e3:.0f} GB/s"
            what = f"linear {name} {outputs} x {inputs}, {rows} rows, bf16: {best[1]} / ours"
            report.ratio(what, best[0] / us["ours"], 0.9, f"{note} of {read:.0f}")


def quantized_linear(kernels: CpuKernels, report: Report) -> None:
    """Weights of 8 and 4 bits against bf16. Two digits: inputs of 15 bits, as for a GGUF file's own blocks."""
    for name, (outputs, inputs) in LINEARS.items():
        weight = (torch.randn(outputs, inputs) * 0.02).bfloat16()
        int4 = to_int4(weight)
        kinds = {"int8": to_int8(weight), "int4": int4, "4 bits, two digits": replace(int4, digits=2)}
        for rows in (1, 8, 32, 128):
            layers = max(1, (24 if rows <= 32 else 3) * 576 * 3072 // max(outputs * inputs, 576 * 3072))
            x = torch.randn(rows, inputs).bfloat16()
            made = {"bf16": [kernels.linear(weight) for _ in range(layers)]}
            for kind, codes in kinds.items():
                made[kind] = [kernels.quantized_linear(codes, None, torch.bfloat16) for _ in range(layers)]
            us = report.race({kind: [lambda f=f, x=x: f(x) for f in made[kind]] for kind in made})  # type: ignore[misc]
            for kind in kinds:
                what = f"linear {name} {outputs} x {inputs}, {rows} rows: bf16 / {kind}"
                report.ratio(what, us["bf16"] / us[kind], None, f"{us[kind]:.0f} us")


class PlainGemm:
    """plain_gemm.cpp, compiled for this machine; not ``found`` where it has no bf16 products or no compiler."""

    def __init__(self) -> None:
        self.found = build.supported()[0].name == "avx512bf16" and shutil.which("g++") is not None
        if not self.found:
            return
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "plain_gemm.so"
            flags = ["-O3", "-std=c++20", "-march=native", "-fopenmp", "-shared", "-fPIC"]
            subprocess.run(["g++", *flags, Path(__file__).with_name("plain_gemm.cpp"), "-o", target], check=True)
            self._library = ctypes.CDLL(str(target))

    def call(self, weight: torch.Tensor, x: torch.Tensor) -> Call:
        outputs, inputs = (ctypes.c_int64(extent) for extent in weight.shape)
        packed = torch.empty_like(weight)
        addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, packed)]
        self._library.plain_pack(ctypes.c_void_p(weight.data_ptr()), addresses[1], outputs, inputs)
        assert torch.equal(weight.flatten()[:2], packed.flatten()[:2])
        rows = ctypes.c_int64(len(x))

        def call(keep: object = (packed, x)) -> torch.Tensor:
            out = torch.empty(len(x), len(weight), dtype=x.dtype)  # as the others do: its pages take time
            self._library.plain_gemm(*addresses, ctypes.c_void_p(out.data_ptr()), rows, outputs, inputs)
            return out

        return call


def read_bandwidth(report: Report) -> float:
    """GB/s of a sum over 256 MiB."""
    words = torch.ones(1 << 26)
    return words.numel() * 4 / report.race({"read": [words.sum]})["read"] / 1e3


def blocks(kernels: CpuKernels, report: Report) -> None:
    """The paper's trade-off: small blocks cost look-ups and short reads, large ones the memory they leave unused."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    batches = {size: Decode.build(32, 500, size, "random", plain_memory) for size in sizes}
    us = report.race({str(size): batch.calls(kernels.paged_decode) for size, batch in batches.items()})
    best = min(us.values())
    for size, batch in batches.items():
        unused = 1 - 500 / (batch.table.shape[1] * size)
        note = f"{us[str(size)]:.0f} us, {unused:.1%} of slots unused"
        report.ratio(f"decode, 32 x 500 tokens, random blocks of {size}: time / best", us[str(size)] / best, None, note)


def sampling(kernels: CpuKernels, report: Report) -> None:
    rows = 64
    logits = (torch.randn(rows, VOCABULARY) * 2.5).bfloat16()
    seeds, positions = torch.arange(rows), torch.full((rows,), 100)
    forms = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (0.8, 0, 1.0, 0.0),
        "top_p": (0.8, 0, 0.95, 0.0),
        "top_k, top_p": (0.8, 50, 0.95, 0.0),
        "min_p": (0.8, 0, 1.0, 0.05),
    }
    for name, (temperature, top_k, top_p, min_p) in forms.items():
        row = (
            torch.full((rows,), temperature),
            torch.full((rows,), top_k),
            torch.full((rows,), top_p),
            torch.full((rows,), min_p),
        )
        us = report.race(
            {
                form: [lambda sample=sample, row=row: sample(logits, *row, seeds, positions)]  # type: ignore[misc]
                for form, sample in (("ours", kernels.sample), ("reference", reference.sample))
            }
        )
        what = f"sampling, {rows} rows of {VOCABULARY} bf16 logits, {name}: the reference / ours"
        report.ratio(what, us["reference"] / us["ours"], 1.0, f"{us['ours']:.0f} us")


def main() -> int:
    parts = {
        "decode": decode,
        "int8": int8,
        "paging": paging,
        "prefill": prefill,
        "linear": linear,
        "quantized": quantized_linear,
        "blocks": blocks,
        "sampling": sampling,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"which of {', '.join(parts)} (default: all)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="for each comparison")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    report = Report(seconds=args.seconds)
    kernels = load()
    print(f"{args.threads} threads, {args.seconds:g} s a comparison")
    for name in args.parts or parts:
        parts[name](kernels, report)
    return 1 if report.below else 0


if __name__ == "__main__":
    sys.exit(main())
