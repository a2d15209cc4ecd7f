"""A CUDA device, or a ROCm one, which torch calls by the same names.

Everything a step asks for is queued on one stream, and nothing waits for it but who looks at its results:

- uploads go through pinned memory, and sampled ids stay on the device for the next step; one queued copy brings them
  (and logprobs) to the host, and an event tells when they are there;
- swaps run on a stream beside, which begins them after all that was queued before;
- steps of decode rows alone are replays of CUDA graphs.

The one wait in a step is of rows with rules on their logits, for the ids of the step before: these were sampled before
the step's own forward pass begins, so the device does not run dry.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kernels.decoder import Batch
from kernels.ops import Kernels
from services.worker import machine
from services.worker.config import WorkerConfig
from services.worker.device import Array, Mark
from services.worker.graphs import GraphedSteps, capture_sizes, graph_bytes
from services.worker.trial import BLOCKS, Trial
from shared.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """A mark: an event on one of the device's streams."""

    event: torch.cuda.Event

    @classmethod
    def record(cls) -> Event:
        """On the current stream. Who waits for it sleeps instead of spinning."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return cls(event)

    def passed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, earlier: Event) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a GPU: all it has; what others than torch's allocator hold, other processes too; what weights and the
    largest step take together; what graphs take."""

    total: int
    others: int
    peak: int
    graphs: int

    def left(self, utilization: float) -> int:
        return int(self.total * utilization) - self.others - self.peak - self.graphs

    def __str__(self) -> str:
        return (
            f"of {self.total} bytes, weights and the largest step take {self.peak}, graphs {self.graphs} and what "
            f"torch does not manage {self.others}"
        )


@contextmanager
def _memory_for(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the GPU has no memory for {what}: {error}") from error


class Cuda:
    def __init__(self, where: torch.device, config: WorkerConfig, cgroup: machine.Cgroup) -> None:
        self.where = where
        self._cgroup = cgroup
        self._sizes = capture_sizes(config)
        self._beside = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]

    def upload(self, array: Array) -> torch.Tensor:
        # The pinned copy is not reused before the transfer is over: torch's allocator of pinned memory sees to that.
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        return pinned.to(self.where, non_blocking=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    def mark(self) -> Event:
        return Event.record()

    def aside(self, work: Callable[[], None]) -> tuple[Event, Event]:
        self._beside.wait_stream(torch.cuda.current_stream(self.where))
        with torch.cuda.stream(self._beside):
            begin = Event.record()
            work()
            return begin, Event.record()

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, Event)
        torch.cuda.current_stream(self.where).wait_event(mark.event)

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.where)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that is pinned where it lies: torch's own comes in powers of two, up to twice as much."""
        memory = torch.empty(shape, dtype=dtype)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        return memory

    def reach(self, block: int) -> None:
        pass

    def begin(self, kernels: Kernels, kv: Sequence[torch.Tensor]) -> None:
        pass

    def check_room(self, kv_bytes: int, swap_bytes: int) -> None:
        if swap_bytes > (free := machine.free_host_memory(self._cgroup)):
            raise ConfigError(f"--swap-space: its blocks take {swap_bytes} bytes, but {free} bytes of memory are free")

    def kv_budget(self, config: WorkerConfig, estimate: int, trial: Trial) -> int:
        """What --gpu-memory-utilization leaves beside the largest step, graphs, and whatever else is on the device."""
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.where)
        self._run(trial)
        peak = torch.cuda.max_memory_allocated(self.where)
        graphs = self._graph_bytes(trial)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.where)
        others = total - free - torch.cuda.memory_reserved(self.where)
        usage = Usage(total=total, others=others, peak=peak, graphs=graphs)
        log.info("GPU memory: %s", usage)
        left = usage.left(config.gpu_memory_utilization)
        if left <= 0:
            raise ConfigError(
                f"--gpu-memory-utilization {config.gpu_memory_utilization} leaves no memory for KV: {usage}"
            )
        return left

    @torch.inference_mode()
    def prepare(self, trial: Trial, kv: list[torch.Tensor], late_compile: Callable[[], None]) -> None:
        self._run(trial)
        if trial.kernels.name != "triton":
            return  # the reference looks at values on the host, which no graph can
        from kernels.triton.warmup import CompileWatch, Shapes, warm_up

        begin = time.perf_counter()
        model = trial.decoder.config
        shapes = Shapes(model.num_heads, model.hidden_size, model.intermediate_size, model.vocab_size, model.qk_norm)
        with _memory_for(f"{len(self._sizes)} graphs (--cudagraph-capture-sizes, --enforce-eager)"):
            warm_up(shapes, kv[0], sorted(set(model.windows)))
            if self._sizes:
                trial.decoder.fused = self._capture(trial, kv, self._sizes)
            torch.cuda.synchronize(self.where)
        CompileWatch(late_compile).start()
        log.info("kernels compiled, %d graphs captured in %.1f s", len(self._sizes), time.perf_counter() - begin)

    def _run(self, trial: Trial) -> None:
        with _memory_for(
            f"the largest step, of --max-num-batched-tokens {trial.tokens} tokens in --max-num-seqs "
            f"{trial.limits.max_num_seqs} sequences"
        ):
            trial.run()
            torch.cuda.synchronize(self.where)

    def _graph_bytes(self, trial: Trial) -> int:
        """What all graphs will take, from capturing the largest, and the largest two."""
        if trial.kernels.name != "triton" or not self._sizes:
            return 0
        kv = trial.allocate(BLOCKS)
        taken = [self._taken(trial, kv, sizes) for sizes in (self._sizes[-1:], self._sizes[-2:])]
        return graph_bytes(taken, len(self._sizes))

    def _taken(self, trial: Trial, kv: list[torch.Tensor], sizes: Sequence[int]) -> int:
        """Bytes of the device that graphs of these sizes hold."""
        torch.cuda.empty_cache()
        before, _ = torch.cuda.mem_get_info(self.where)
        graphs = self._capture(trial, kv, sizes)
        torch.cuda.synchronize(self.where)
        torch.cuda.empty_cache()
        after, _ = torch.cuda.mem_get_info(self.where)
        del graphs
        return before - after

    @torch.inference_mode()
    def _capture(self, trial: Trial, kv: list[torch.Tensor], sizes: Sequence[int]) -> GraphedSteps:
        from kernels.triton.graphs import DecodeGraphs

        def forward(batch: Batch) -> torch.Tensor:
            return trial.decoder.forward(batch, kv)

        graphs = DecodeGraphs(forward, sizes, trial.limits.max_blocks, self.where)
        graphs.capture()
        return GraphedSteps(trial.decoder, graphs)
