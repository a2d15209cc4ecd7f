"""The Triton kernels on a GPU: right first, then how fast, with the real shapes of two models and random weights.

    python benchmarks/gpu_check.py

Correctness is against float64. Times are beside torch's scaled_dot_product_attention on KV already gathered (so
without the price of gathering) and beside the floor: bytes that must be read over the measured memory bandwidth, or
for prefill the operations over the measured rate of large matrix products. Takes a few minutes, and exits with 1 when
anything is wrong and with 2 when there is no GPU.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BLOCK = 16
COLD_BYTES = 256 << 20  # KV that is cycled through, so that no cache holds it


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qk_norm: bool

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


SMOLLM2 = Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, False)
QWEN3 = Shape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, True)
OTHERS = (
    Shape("D80 group 4", 1, 640, 8, 2, 80, 1024, 1000, False),
    Shape("D96 group 1", 1, 384, 4, 4, 96, 1024, 1000, False),
    Shape("D256 group 16", 1, 4096, 16, 1, 256, 1024, 1000, False),
)


class Memory:
    """One layer's KV of sequences of the given lengths in shuffled blocks; all but live tokens is NaN."""

    def __init__(self, shape: Shape, lengths: list[int], dtype: torch.dtype, device: torch.device) -> None:
        counts = [-(-length // BLOCK) for length in lengths]
        blocks = (torch.randperm(sum(counts), device=device) + 1).split(counts)
        tail = (2, shape.kv_heads, BLOCK, shape.head_dim)
        self.kv = torch.randn((sum(counts) + 1, *tail), dtype=dtype, device=device)
        self.kv[0] = 0
        self.table = torch.full((len(lengths), max([*counts, 1])), 1 << 30, dtype=torch.int32, device=device)
        for row, (length, owned) in enumerate(zip(lengths, blocks, strict=True)):
            self.table[row, : len(owned)] = owned
            if length % BLOCK:
                self.kv[owned[-1], :, :, length % BLOCK :] = math.nan
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=device)

    def gathered(self, row: int) -> torch.Tensor:
        """[2, K, length, D] of one sequence."""
        length = int(self.lens[row])
        owned = self.kv[self.table[row, : -(-length // BLOCK)].long()]
        return owned.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]


def oracle(q: torch.Tensor, memory: Memory, row: int, scale: float) -> torch.Tensor:
    """float64 attention of the last ``len(q)`` tokens, q [T, H, D]."""
    keys, values = memory.gathered(row).double()
    group = q.shape[1] // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    length = keys.shape[1]
    at = torch.arange(length - len(q), length, device=q.device)[:, None]
    hidden = torch.arange(length, device=q.device)[None] > at
    scores = (q.transpose(0, 1).double() @ keys.transpose(1, 2) * scale).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1)


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def close(self, what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        limit = TOLERANCE[got.dtype]
        error = (got.double() - wanted).abs()
        worst, mean = float(error.nan_to_num(math.inf).max()), float(error.mean())
        self.that(f"{what}: largest error {worst:.1e} (limit {limit:.0e})", worst < limit and mean < limit / 4)

    def that(self, what: str, right: bool) -> None:
        self.failed += not right
        print(f"  {'ok  ' if right else 'FAIL'} {what}", flush=True)


def check_attention(shape: Shape, dtype: torch.dtype, device: torch.device, lengths: list[int], checks: Checks) -> None:
    from kernels import triton as kernels

    name = f"{shape.name} {str(dtype)[6:]}"
    memory = Memory(shape, lengths, dtype, device)
    q = torch.randn(len(lengths), shape.heads, shape.head_dim, dtype=dtype, device=device)
    got = kernels.paged_decode(q, memory.kv, memory.table, memory.lens, shape.scale, 0, 0.0)
    wanted = torch.zeros(q.shape, dtype=torch.float64, device=device)
    for row, length in enumerate(lengths):
        if length:
            wanted[row] = oracle(q[row : row + 1], memory, row, shape.scale)[0]
    checks.close(f"{name} decode", got, wanted)
    alone = [
        kernels.paged_decode(
            q[row : row + 1], memory.kv, memory.table[row : row + 1], memory.lens[row : row + 1], shape.scale, 0, 0.0
        )
        for row in range(len(lengths))
    ]
    checks.that(f"{name} decode: same bits alone and in the batch", torch.equal(torch.cat(alone), got))

    new = [min(length, (1, 7, 600, 130)[i % 4]) for i, length in enumerate(lengths)]
    bounds = torch.tensor([0, *new], device=device).cumsum(0).int()
    q = torch.randn(sum(new), shape.heads, shape.head_dim, dtype=dtype, device=device)
    got = kernels.paged_prefill(q, memory.kv, memory.table, bounds, memory.lens, shape.scale, 0, 0.0)
    parts = [oracle(part, memory, row, shape.scale) for row, part in enumerate(q.split(new)) if len(part)]
    checks.close(f"{name} prefill", got, torch.cat(parts))


def check_rest(device: torch.device, vocab: int, rows: int, checks: Checks) -> None:
    from kernels import reference
    from kernels import triton as kernels

    dtype = torch.bfloat16
    x, weight = torch.randn(7, 2560, device=device).to(dtype), torch.randn(2560, device=device).to(dtype)
    got, wanted = kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)
    checks.that("rms_norm as the reference", torch.allclose(got.float(), wanted.float(), rtol=2**-6, atol=1e-6))
    qkv, kv = torch.randn(5, 15, 64, device=device).to(dtype), torch.zeros(4, 2, 3, 16, 64, dtype=dtype, device=device)
    turned, wanted_kv = qkv.clone(), kv.clone()
    cos_sin, slots = torch.randn(50, 64, device=device), torch.tensor([17, -1, 0, 63, 48], device=device)
    positions = torch.tensor([0, 49, 5, 5, 42], device=device)
    reference.rope(turned[:, :12], cos_sin, positions)
    reference.store_kv(turned[:, 9:12], turned[:, 12:], wanted_kv, slots)
    kernels.rope_store(qkv, kv, cos_sin, positions, slots)
    right = all(
        torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-6)
        for a, b in ((qkv[:, :9], turned[:, :9]), (kv, wanted_kv))
    )
    checks.that("rope_store as the reference", right)

    logits = torch.randn(rows, vocab, device=device) * 3
    index = torch.arange(rows, device=device)
    chosen = (
        torch.tensor([0.0, 1.0, 0.7, 1.3], device=device)[index % 4],
        torch.tensor([0, 0, 50], device=device)[index % 3],
        torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0], device=device)[index % 5],
        torch.tensor([0.0, 0.0, 0.0, 0.05], device=device)[index // 4 % 4],
        index * 977 + 5,
        index % 31,
    )
    got = kernels.sample(logits, *chosen).cpu()
    wanted = reference.sample(logits.cpu(), *(values.cpu() for values in chosen))
    differ = int((got != wanted).sum())
    # logarithms differ in the last place between devices; that decides a draw about once in a million
    checks.that(f"sampling: {differ} of {rows} draws differ from the reference's on the CPU", differ <= 1)


def seconds(step: Callable[[], object], least: float = 0.03) -> float:
    """Seconds a call of ``step`` takes on the device, the median of three runs of at least ``least``."""
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    calls = max(1, min(1000, round(least / max(time.perf_counter() - begin, 1e-6))))
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / calls)
    return statistics.median(times)


def captured(step: Callable[[], object]) -> Callable[[], None]:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def bandwidth(device: torch.device) -> float:
    """Bytes per second of reading: a sum over 4 GiB."""
    words = torch.zeros(1 << 30, dtype=torch.float32, device=device)
    return words.nbytes / seconds(lambda: words.sum())


def rate(device: torch.device) -> float:
    """Operations per second of a large bfloat16 matrix product."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    return 2 * 8192**3 / seconds(lambda: a @ a)


def time_decode(shape: Shape, rows: int, context: int, device: torch.device, read: float) -> None:
    from kernels import triton as kernels

    dtype = torch.bfloat16
    kv_bytes = rows * context * 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    layers = max(2, -(-COLD_BYTES // kv_bytes))
    memories = [Memory(shape, [context] * rows, dtype, device) for _ in range(min(layers, 64))]
    q = torch.randn(rows, shape.heads, shape.head_dim, dtype=dtype, device=device)

    def ours() -> None:
        for memory in memories:
            kernels.paged_decode(q, memory.kv, memory.table, memory.lens, shape.scale, 0, 0.0)

    eager = seconds(ours) / len(memories)
    graphed = seconds(captured(ours)) / len(memories)
    dense = [torch.stack([memory.gathered(row) for row in range(rows)], 1) for memory in memories]  # [2, S, K, N, D]
    memories.clear()

    def theirs() -> None:
        for keys, values in dense:
            F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, scale=shape.scale, enable_gqa=True)

    sdpa = seconds(captured(theirs)) / len(dense)
    floor = kv_bytes / read
    print(
        f"  {shape.name:13} {rows:4} x {context:6}  {graphed * 1e6:9.1f} us  {kv_bytes / graphed / 1e9:6.0f} GB/s  "
        f"floor/ours {floor / graphed:5.2f}  sdpa/ours {sdpa / graphed:6.2f}  without a graph {eager * 1e6:8.1f} us",
        flush=True,
    )


def time_prefill(shape: Shape, new: int, context: int, device: torch.device, operations: float) -> None:
    """``new`` tokens after ``context`` others."""
    from kernels import triton as kernels

    dtype = torch.bfloat16
    memory = Memory(shape, [context + new], dtype, device)
    q = torch.randn(new, shape.heads, shape.head_dim, dtype=dtype, device=device)
    bounds = torch.tensor([0, new], dtype=torch.int32, device=device)
    ours = seconds(lambda: kernels.paged_prefill(q, memory.kv, memory.table, bounds, memory.lens, shape.scale, 0, 0.0))
    keys, values = (part.unsqueeze(0).contiguous() for part in memory.gathered(0))
    queries = q.transpose(0, 1).unsqueeze(0).contiguous()
    mask = None
    if context:
        at = torch.arange(context, context + new, device=device)[:, None]
        mask = torch.arange(context + new, device=device)[None] <= at
    sdpa = seconds(
        lambda: F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=shape.scale, enable_gqa=True
        )
    )
    count = 4 * shape.heads * shape.head_dim * (new * context + new * (new + 1) // 2)
    print(
        f"  {shape.name:13} {new:6} after {context:6}  {ours * 1e6:9.1f} us  {count / ours / 1e12:6.1f} TFLOP/s  "
        f"floor/ours {count / operations / ours:5.2f}  sdpa/ours {sdpa / ours:6.2f}",
        flush=True,
    )


class Model:
    """A decoder of random weights: what a step launches, without what depends on the weights' values."""

    def __init__(self, shape: Shape, rows: int, context: int, device: torch.device) -> None:
        from kernels import triton as kernels

        self.kernels, self.shape = kernels, shape
        dtype = torch.bfloat16

        def weight(outputs: int, inputs: int) -> torch.Tensor:
            return torch.randn(outputs, inputs, dtype=dtype, device=device) * inputs**-0.5

        inner = shape.heads * shape.head_dim
        self.layers = [
            (
                weight(inner + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
                weight(shape.hidden, inner),
                weight(2 * shape.intermediate, shape.hidden),
                weight(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.layers)
        ]
        self.embedding = weight(shape.vocab, shape.hidden)
        self.norm = torch.ones(shape.hidden, dtype=dtype, device=device)
        self.head_norm = torch.ones(shape.head_dim, dtype=dtype, device=device)
        self.cos_sin = torch.rand(context + 1, shape.head_dim, device=device)
        blocks = -(-context // BLOCK)
        self.kv = [
            torch.zeros(rows * blocks + 1, 2, shape.kv_heads, BLOCK, shape.head_dim, dtype=dtype, device=device)
            for _ in range(shape.layers)
        ]
        self.table = (torch.randperm(rows * blocks, device=device).int() + 1).view(rows, blocks)
        self.weight_bytes = sum(part.nbytes for layer in self.layers for part in layer) + self.embedding.nbytes

    def __call__(self, inputs: object) -> torch.Tensor:
        from kernels.triton.graphs import DecodeInputs

        assert isinstance(inputs, DecodeInputs)
        shape, kernels = self.shape, self.kernels
        rows = len(inputs.tokens)
        residual = self.embedding[inputs.tokens]
        x = kernels.rms_norm(residual, self.norm, 1e-6)
        for kv, (qkv_weight, out, gate_up, down) in zip(self.kv, self.layers, strict=True):
            qkv = F.linear(x, qkv_weight).view(rows, -1, shape.head_dim)
            if shape.qk_norm:
                heads = qkv[:, : shape.heads + shape.kv_heads]
                heads.copy_(kernels.rms_norm(heads, self.head_norm, 1e-6))
            kernels.rope_store(qkv, kv, self.cos_sin, inputs.positions, inputs.slot_mapping)
            attended = kernels.paged_decode(
                qkv[:, : shape.heads], kv, inputs.block_table, inputs.seq_lens, shape.scale, 0, 0.0
            )
            x = kernels.add_rms_norm(F.linear(attended.view(rows, -1), out), residual, self.norm, 1e-6)
            activated = kernels.silu_mul(F.linear(x, gate_up))
            x = kernels.add_rms_norm(F.linear(activated, down), residual, self.norm, 1e-6)
        return F.linear(x, self.embedding)


def time_steps(shape: Shape, sizes: list[int], context: int, device: torch.device, read: float, checks: Checks) -> None:
    """Whole decode steps, sampling excluded, with and without CUDA graphs."""
    from kernels.triton.graphs import DecodeGraphs, DecodeInputs
    from kernels.triton.warmup import CompileWatch, Shapes, warm_up

    model = Model(shape, sizes[-1], context, device)
    warm_up(Shapes(shape.heads, shape.hidden, shape.intermediate, shape.vocab, shape.qk_norm), model.kv[0])
    watch = CompileWatch()
    watch.start()
    graphs = DecodeGraphs(model, sizes, model.table.shape[1], device)
    graphs.capture()
    for rows in sizes:
        last = torch.full((rows,), context - 1, device=device)
        slots = model.table[:rows, -1].long() * BLOCK + last % BLOCK
        lens = (last + 1).int()
        inputs = DecodeInputs(torch.zeros_like(last), last, slots, model.table[:rows], lens)
        same = torch.equal(graphs.run(inputs), model(inputs))
        eager, graphed = seconds(lambda inputs=inputs: model(inputs)), seconds(lambda inputs=inputs: graphs.run(inputs))
        kv_bytes = rows * context * 2 * shape.kv_heads * shape.head_dim * 2 * shape.layers
        floor = (model.weight_bytes + kv_bytes) / read
        print(
            f"  {shape.name:13} {rows:4} x {context}  eager {eager * 1e3:7.2f} ms  graph {graphed * 1e3:7.2f} ms  "
            f"{rows / graphed:8.0f} tok/s  floor/graph {floor / graphed:5.2f}",
            flush=True,
        )
        checks.that(f"{shape.name} {rows} rows: a replay gives the bits of the eager step", same)
    watch.stop()
    checks.that(f"{shape.name}: {watch.count} kernels were compiled after the warm-up", watch.count == 0)


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_check needs a GPU, and torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    import triton

    if triton.knobs.runtime.interpret:
        print("gpu_check measures compiled kernels: unset TRITON_INTERPRET", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    torch.manual_seed(0)
    device, checks = torch.device("cuda"), Checks()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")

    print("correctness")
    lengths = [1, 15, 16, 17, 300, 0, 1100, 5000]
    for shape in (SMOLLM2, QWEN3, *OTHERS):
        for dtype in TOLERANCE:
            check_attention(shape, dtype, device, lengths, checks)
    check_rest(device, QWEN3.vocab, 256, checks)

    read, operations = bandwidth(device), rate(device)
    print(f"memory read {read / 1e9:.0f} GB/s, bf16 products {operations / 1e12:.0f} TFLOP/s")
    print("decode, bf16, cold memory, random blocks, in a CUDA graph")
    for shape in (SMOLLM2, QWEN3):
        for rows, context in ((1, 1024), (1, 16384), (8, 4096), (32, 512), (32, 4096), (128, 2048), (256, 1024)):
            time_decode(shape, rows, context, device, read)
    print("prefill, bf16")
    for shape in (SMOLLM2, QWEN3):
        for new, context in ((512, 0), (2048, 0), (8192, 0), (512, 7680)):
            time_prefill(shape, new, context, device, operations)
    print("whole decode steps, bf16, without sampling")
    for shape in (SMOLLM2, QWEN3):
        with torch.inference_mode():
            time_steps(shape, [1, 8, 32, 128], 1024, device, read, checks)
    print(f"{checks.failed} checks failed, {time.perf_counter() - begin:.0f} s")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
