"""What ``services.worker.cuda`` asks of torch.cuda, on the CPU, as no GPU can be had to run it on.

Work is done at once, in the order in which it is given, so results are right whatever streams are used. What a GPU
would be free to do in another order is seen from clocks: each stream counts what it was given and knows how much of
every other stream's work it waits for (Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System",
1978, as vectors). A captured graph keeps its operations with the tensors they had, and does them again on the same
memory when it is replayed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.ops import Kernels

GIB = 1 << 30


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.clock: dict[Stream, int] = {self: 0}

    def tick(self) -> dict[Stream, int]:
        self.clock[self] += 1
        return dict(self.clock)

    def learn(self, clock: dict[Stream, int]) -> None:
        for stream, at in clock.items():
            self.clock[stream] = max(at, self.clock.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.clock)

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)


MAIN = Stream()
_current = [MAIN]


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert enable_timing and blocking

    def record(self) -> None:
        self.clock = _current[-1].tick()
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1000


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


@dataclass(frozen=True)
class Access:
    """An operation on blocks of a memory, ``device`` or ``host``."""

    name: str
    reads: frozenset[tuple[str, int]]
    writes: frozenset[tuple[str, int]]
    stream: Stream
    clock: dict[Stream, int]

    def before(self, clock: dict[Stream, int]) -> bool:
        return clock.get(self.stream, 0) >= self.clock[self.stream]

    def conflicts(self, other: Access) -> bool:
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


class WatchedKernels(Kernels):
    """Kernels that tell which blocks they read and write, and on which stream."""

    def __init__(self, name: str, backend: Any) -> None:
        super().__init__(name, backend)
        self.accesses: list[Access] = []

    def rope_store(self, qkv: Any, kv: torch.Tensor, cos_sin: Any, positions: Any, slot_mapping: torch.Tensor) -> None:
        slots = slot_mapping[slot_mapping >= 0] // kv.shape[3]
        self._access("store", writes=[("device", int(block)) for block in slots])
        super().rope_store(qkv, kv, cos_sin, positions, slot_mapping)

    def paged_decode(self, q: Any, kv: Any, block_table: Any, seq_lens: Any, **options: Any) -> torch.Tensor:
        self._access("decode", reads=_blocks(kv, block_table, seq_lens))
        return super().paged_decode(q, kv, block_table, seq_lens, **options)

    def paged_prefill(self, q: Any, kv: Any, block_table: Any, cu: Any, seq_lens: Any, **options: Any) -> torch.Tensor:
        self._access("prefill", reads=_blocks(kv, block_table, seq_lens))
        return super().paged_prefill(q, kv, block_table, cu, seq_lens, **options)

    def copy_blocks(self, kvs: Any, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self._access("copy", [("device", b) for b in sources.tolist()], [("device", b) for b in destinations.tolist()])
        super().copy_blocks(kvs, sources, destinations)

    def swap_blocks(self, source_kvs: Any, target_kvs: Any, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        out = source_kvs[0].shape[0] > target_kvs[0].shape[0]  # the host pool is the smaller one
        names = ("device", "host") if out else ("host", "device")
        self._access(
            "swap_out" if out else "swap_in",
            [(names[0], block) for block in sources.tolist()],
            [(names[1], block) for block in destinations.tolist()],
        )
        super().swap_blocks(source_kvs, target_kvs, sources, destinations)

    def _access(self, name: str, reads: Any = (), writes: Any = ()) -> None:
        stream = _current[-1]
        self.accesses.append(Access(name, frozenset(reads), frozenset(writes), stream, stream.tick()))

    def races(self) -> list[tuple[str, str]]:
        """Pairs of operations on one block, one of them a write, that a GPU might do in the other order."""
        pairs = ((a, b) for i, a in enumerate(self.accesses) for b in self.accesses[i + 1 :])
        return [(a.name, b.name) for a, b in pairs if a.conflicts(b) and not a.before(b.clock)]


def _blocks(kv: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor) -> list[tuple[str, int]]:
    return [
        ("device", block)
        for table, length in zip(tables.tolist(), lens.tolist(), strict=True)
        for block in table[: -(-length // kv.shape[3])]
    ]


class CUDAGraph:
    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []

    def keep(self, operation: Callable[[], Any], result: Any) -> None:
        def again() -> None:
            for kept, new in zip(tree_leaves(result), tree_leaves(operation()), strict=True):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)

        self.operations.append(again)

    def replay(self) -> None:
        for operation in self.operations:
            operation()


_capturing: list[CUDAGraph | None] = []  # the innermost last; None inside of an operation that is kept whole


class _Capture(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if _capturing[-1] is not None:
            self._graph.keep(lambda: function(*args, **(kwargs or {})), result)
        return result


@contextlib.contextmanager
def capture(graph: CUDAGraph, pool: object, stream: Stream) -> Iterator[None]:
    assert pool == "pool"
    _capturing.append(graph)
    try:
        with on(stream), _Capture(graph):
            yield
    finally:
        _capturing.pop()


class CapturableBackend:
    """A backend whose operations are kept whole by the graph that is captured, as launches are."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._backend, name)

        def call(*arguments: Any) -> Any:
            graph = _capturing[-1] if _capturing else None
            if graph is None:
                return operation(*arguments)
            _capturing.append(None)
            result = operation(*arguments)
            _capturing.pop()
            graph.keep(lambda: operation(*arguments), result)
            return result

        return call


class Memory:
    """The figures of a GPU of 10 GiB, of which others have 1 GiB and torch 3 GiB, 4 GiB at its peak. A captured graph
    takes 8 MiB of it, the first 64 MiB more."""

    def __init__(self) -> None:
        self.graphs = 0
        self.registered: dict[int, int] = {}

    def mem_get_info(self, device: object) -> tuple[int, int]:
        graphs = self.graphs * 8 * (1 << 20) + (64 << 20 if self.graphs else 0)
        self.graphs = 0
        return 6 * GIB - graphs, 10 * GIB

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered[address] = size
        return 0


def install(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Puts all this where torch.cuda is, until the test ends."""
    memory = Memory()
    empty = torch.empty

    def graph(graph: CUDAGraph, pool: object, stream: Stream) -> Any:
        memory.graphs += 1
        return capture(graph, pool, stream)

    def pinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options)

    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: "pool",
        "stream": on,
        "current_stream": lambda device: _current[-1],
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: 4 * GIB,
        "memory_reserved": lambda device: 3 * GIB,
        "mem_get_info": memory.mem_get_info,
        "cudart": lambda: memory,
        "check_error": lambda status: None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    return memory
