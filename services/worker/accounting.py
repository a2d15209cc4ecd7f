"""Measures the parts of steps of a loaded model, in pairs with the matrix products alone, and the machine's peaks."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from services.worker.machine import Cgroup, free_host_memory
from services.worker.model_executor import ModelExecutor
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from shared.codec import int32
from shared.wire import NewRow, Plan

STEP = (1, 1, 1)  # step_id and epochs, which the executor does not look at
PARTS = ("linear", "head", "attention", "other", "sample")
HEADER = (
    f"{'':<14} {'step ms':>8} {'median':>8} "
    + " ".join(f"{name:>9}" for name in (*PARTS, "python"))
    + f" {'floor':>8} {'x floor':>8} {'GFLOP/s':>8} {'of peak':>8} {'GB/s':>8} {'of peak':>8}"
)


def account(
    executor: ModelExecutor, batches: Sequence[int], prompts: Sequence[int], context: int, steps: int
) -> Iterator[str]:
    """Lines of a table. Times are milliseconds: the least of a step and of the floor, the median of a step, and the
    medians of parts. The floor is every linear layer alone, called one by one after each step: ours or, where it is
    faster, torch's of the same shapes."""
    flops, bandwidth = _peak_flops(executor), _peak_bandwidth(executor)
    yield f"peaks: {flops / 1e9:.0f} GFLOP/s in a linear layer of 512 rows, {bandwidth / 1e9:.1f} GB/s read"
    yield HEADER
    for batch in batches:
        bench = _Bench(executor, batch, batch)
        bench.fill(batch, context, steps)
        for _ in range(steps):
            bench.step(Plan(*STEP, full=False, decodes=batch))
        yield bench.line(f"decode {batch}", context + steps // 2, flops, bandwidth)
    for tokens in prompts:
        bench = _Bench(executor, tokens, 1)
        for _ in range(max(2, steps // 2)):
            bench.step(_prompts(executor, [0], tokens, tokens))
        yield bench.line(f"prompt {tokens}", tokens // 2, flops, bandwidth)


class _Bench:
    """Steps of ``rows`` tokens, of which ``samples`` sample, and what they took."""

    def __init__(self, executor: ModelExecutor, rows: int, samples: int) -> None:
        self._executor = executor
        self._rows, self._samples = rows, samples
        self._floor_calls = [_products(executor.decoder, rows, samples)]
        if (torch_call := _torch_products(executor.decoder, rows, samples)) is not None:
            self._floor_calls.append(torch_call)
        self._walls: list[float] = []
        self._floors: list[float] = []
        self._parts: dict[str, list[float]] = defaultdict(list)

    def fill(self, sequences: int, context: int, steps: int) -> None:
        """Computes prompts, a few at a time."""
        at_once = max(1, 2048 // context)
        for first in range(0, sequences, at_once):
            slots = list(range(first, min(sequences, first + at_once)))
            capacity = context + steps + 1
            self._executor.execute(_prompts(self._executor, slots, context, capacity, full=first == 0, decodes=first))

    def step(self, plan: Plan) -> None:
        begin = time.perf_counter()
        timings = self._executor.execute(plan).timings
        wall = time.perf_counter() - begin
        self._walls.append(wall)
        for name in PARTS:
            self._parts[name].append(timings.get(name, 0.0))
        self._parts["python"].append(wall - sum(timings.get(name, 0.0) for name in PARTS))
        self._floors.append(min(_seconds(call, self._executor) for call in self._floor_calls))

    def line(self, name: str, context: int, peak_flops: float, peak_bandwidth: float) -> str:
        wall, floor = min(self._walls), min(self._floors)
        memory = self._executor.memory
        token_bytes = memory.bytes_per_block // memory.block_size
        flops, read = _work(self._executor.decoder, self._rows, self._samples, context, token_bytes)
        parts = " ".join(f"{statistics.median(times) * 1e3:9.2f}" for times in self._parts.values())
        ratio = statistics.median(a / b for a, b in zip(self._walls, self._floors, strict=True))
        return (
            f"{name:<14} {wall * 1e3:8.2f} {statistics.median(self._walls) * 1e3:8.2f} {parts} {floor * 1e3:8.2f} "
            f"{ratio:8.2f} {flops / wall / 1e9:8.0f} {flops / wall / peak_flops:8.0%} {read / wall / 1e9:8.1f} "
            f"{read / wall / peak_bandwidth:8.0%}"
        )


def _prompts(
    executor: ModelExecutor, slots: Sequence[int], tokens: int, capacity: int, *, full: bool = True, decodes: int = 0
) -> Plan:
    """Computes random prompts in new slots, with blocks for ``capacity`` tokens each, beside ``decodes`` rows."""
    blocks = -(-capacity // executor.memory.block_size)
    table = [1 + slot * blocks + i for slot in slots for i in range(blocks)]
    ids = torch.randint(executor.memory.vocab_size, (len(slots) * tokens,)).tolist()
    return Plan(
        *STEP,
        full=full,
        decodes=decodes,
        new_rows=[NewRow(slot, 0, 0, 0.0, 1.0, 0, 0.0, seed=0) for slot in slots],
        chunk_slots=list(slots),
        chunk_starts=[0] * len(slots),
        chunk_lens=[tokens] * len(slots),
        chunk_samples=[[slot] for slot in slots],
        table_slots=list(slots),
        table_lens=[blocks] * len(slots),
        tokens=int32(ids),
        table_blocks=int32(table),
    )


def _products(decoder: Decoder, rows: int, samples: int) -> Callable[[], None]:
    """A call of every linear layer as a step of ``rows`` tokens makes it, and of nothing else."""
    config = decoder.config
    hidden = _random(decoder, rows, config.hidden_size)
    attended = _random(decoder, rows, config.num_heads * config.head_dim)
    inner = _random(decoder, rows, config.intermediate_size)
    last = hidden[:samples]

    def call() -> None:
        for layer in decoder.layers:
            layer.qkv(hidden)
            layer.out(attended)
            layer.gate_up(hidden)
            layer.down(inner)
        decoder.head(last)

    return call


def _torch_products(decoder: Decoder, rows: int, samples: int) -> Callable[[], None] | None:
    """The same by oneDNN over weights that it packed for so many rows; None where that is not the question: on a GPU,
    in a dtype that oneDNN does not take, with quantised weights, or where memory would not hold the weights again."""
    config, dtype = decoder.config, decoder.embedding.dtype
    size = dtype.itemsize * (config.num_layers * _layer_weights(config) + config.hidden_size * config.vocab_size)
    plain = decoder.quantization == "none" and dtype in (torch.float32, torch.bfloat16)
    if decoder.embedding.device.type != "cpu" or not plain or 3 * size > free_host_memory(Cgroup()):
        return None
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = [(q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner)]
    layers = [(shape, rows) for _ in range(config.num_layers) for shape in shapes]
    head = (config.vocab_size, hidden)
    weights = {shape: torch.randn(shape).to(dtype) for shape in {*shapes, head}}
    calls = []
    for shape, count in [*layers, (head, samples)]:
        packed = torch.ops.mkldnn._reorder_linear_weight(weights[shape], count)  # a copy for each layer
        calls.append((torch.randn(count, shape[1]).to(dtype), packed))

    def call() -> None:
        for x, packed in calls:
            torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    return call


def _layer_weights(config: ModelConfig) -> int:
    """Weights of the linear layers of one layer."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)


def _work(decoder: Decoder, rows: int, samples: int, context: int, token_bytes: int) -> tuple[float, float]:
    """Floating-point operations of a step, and bytes it must read: each weight once, and keys and values, which take
    ``token_bytes`` a token."""
    config, size = decoder.config, decoder.embedding.dtype.itemsize
    layers, head = config.num_layers * _layer_weights(config), config.hidden_size * config.vocab_size
    attention = 4 * rows * context * config.num_heads * config.head_dim * config.num_layers
    read = size * (layers + head) + samples * context * token_bytes
    return float(2 * rows * layers + 2 * samples * head + attention), float(read)


def _random(decoder: Decoder, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=decoder.embedding.dtype, device=decoder.embedding.device)


def _peak_flops(executor: ModelExecutor) -> float:
    decoder = executor.decoder
    x = _random(decoder, 512, decoder.config.hidden_size)
    outputs = 2 * decoder.config.intermediate_size
    return 2 * 512 * outputs * decoder.config.hidden_size / _least(lambda: decoder.layers[0].gate_up(x), executor)


def _peak_bandwidth(executor: ModelExecutor) -> float:
    words = torch.ones(1 << 26, device=executor.device.where)
    return words.numel() * 4 / _least(words.sum, executor)


def _least(call: Callable[[], object], executor: ModelExecutor, seconds: float = 1.0) -> float:
    """Seconds of the fastest of the calls that fit into some time."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        times.append(_seconds(call, executor))
    return min(times)


def _seconds(call: Callable[[], object], executor: ModelExecutor) -> float:
    """From the call to when the device has done what it was given."""
    begin = time.perf_counter()
    call()
    executor.device.mark().wait()
    return time.perf_counter() - begin
