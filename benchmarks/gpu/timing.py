"""Attention's time beside torch's on gathered KV, and beside what memory or products allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.gpu.shapes import Memory, Shape
from kernels import ops

COLD_BYTES = 256 << 20  # KV that is cycled through, so that no cache holds it


class Timer:
    """Times calls on a device; on a CPU just once, to see that they run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.real = device.type == "cuda"

    def seconds(self, step: Callable[[], object], least: float = 0.03) -> float:
        """Seconds a call of ``step`` takes on the device, the median of three runs of at least ``least``."""
        if not self.real:
            begin = time.perf_counter()
            step()
            return time.perf_counter() - begin
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

    def captured(self, step: Callable[[], object]) -> Callable[[], object]:
        """``step`` as a CUDA graph; on a CPU as it is."""
        if not self.real:
            return step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        return graph.replay

    def bandwidth(self) -> float:
        """Bytes per second of reading: a sum over 4 GiB."""
        words = torch.zeros(1 << (30 if self.real else 20), dtype=torch.float32, device=self.device)
        return words.nbytes / self.seconds(lambda: words.sum())

    def rate(self) -> float:
        """Operations per second of a large bfloat16 matrix product."""
        size = 8192 if self.real else 128
        a = torch.randn(size, size, dtype=torch.bfloat16, device=self.device)
        return 2 * size**3 / self.seconds(lambda: a @ a)


def time_decode(shape: Shape, rows: int, context: int, timer: Timer, read: float) -> None:
    kernels, dtype = ops.select(timer.device, "triton"), torch.bfloat16
    kv_bytes = rows * context * 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    layers = min(64, max(2, -(-COLD_BYTES // kv_bytes))) if timer.real else 1
    memories = [Memory(shape, [context] * rows, dtype, timer.device) for _ in range(layers)]
    q = torch.randn(rows, shape.heads, shape.head_dim, dtype=dtype, device=timer.device)

    def ours() -> None:
        for memory in memories:
            kernels.paged_decode(q, memory.kv, memory.table, memory.lens, scale=shape.scale)

    eager = timer.seconds(ours) / layers
    graphed = timer.seconds(timer.captured(ours)) / layers
    dense = [torch.stack([memory.gathered(row) for row in range(rows)], 1) for memory in memories]  # [2, S, K, N, D]
    memories.clear()

    def theirs() -> None:
        for keys, values in dense:
            F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, scale=shape.scale, enable_gqa=True)

    sdpa = timer.seconds(timer.captured(theirs)) / len(dense)
    floor = kv_bytes / read
    print(
        f"  {shape.name:13} {rows:4} x {context:6}  {graphed * 1e6:9.1f} us  {kv_bytes / graphed / 1e9:6.0f} GB/s  "
        f"floor/ours {floor / graphed:5.2f}  sdpa/ours {sdpa / graphed:6.2f}  without a graph {eager * 1e6:8.1f} us",
        flush=True,
    )


def time_prefill(shape: Shape, new: int, context: int, timer: Timer, operations: float) -> None:
    """``new`` tokens after ``context`` others."""
    kernels, dtype, device = ops.select(timer.device, "triton"), torch.bfloat16, timer.device
    memory = Memory(shape, [context + new], dtype, device)
    q = torch.randn(new, shape.heads, shape.head_dim, dtype=dtype, device=device)
    bounds = torch.tensor([0, new], dtype=torch.int32, device=device)
    ours = timer.seconds(
        lambda: kernels.paged_prefill(q, memory.kv, memory.table, bounds, memory.lens, scale=shape.scale)
    )
    keys, values = (part.unsqueeze(0).contiguous() for part in memory.gathered(0))
    queries = q.transpose(0, 1).unsqueeze(0).contiguous()
    mask = None
    if context:
        at = torch.arange(context, context + new, device=device)[:, None]
        mask = torch.arange(context + new, device=device)[None] <= at
    sdpa = timer.seconds(
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
