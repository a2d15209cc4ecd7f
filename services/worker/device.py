"""What the executor asks of the device it runs on, beside the kernels; and the device that is the CPU itself.

A device may run behind the process that gives it work, in the order in which that was given. So what goes to it and
what comes from it is under way until a ``Mark`` that was made later has passed. On a CPU a call that returns is over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from kernels.cpu import pages
from kernels.ops import Kernels
from services.worker import machine
from services.worker.config import WorkerConfig
from services.worker.kv_pages import KvPages
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.worker.trial import Trial

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


class Mark(Protocol):
    """A point in what was given to a device."""

    def passed(self) -> bool:
        """Raises what went wrong on the device before it; so does ``wait``."""
        ...

    def wait(self) -> None:
        """Returns when it has passed; any thread may wait."""
        ...

    def since(self, earlier: Any) -> float:
        """Seconds from an earlier mark of the same device to this one; both have passed."""
        ...


class Device(Protocol):
    where: torch.device

    def upload(self, array: Array) -> torch.Tensor:
        """``array`` on the device, for what is given to it from now on. On a CPU it is the array's own memory."""
        ...

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in the host's memory, where it is once a later mark has passed."""
        ...

    def mark(self) -> Mark: ...

    def aside(self, work: Callable[[], None]) -> tuple[Mark, Mark]:
        """Gives the device ``work`` that begins after all it was given before and runs beside all that it is given
        later. Returns where it begins and ends."""
        ...

    def follow(self, mark: Mark) -> None:
        """What is given from now on begins after ``mark``."""
        ...

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the device, much of it. Raises OSError or RuntimeError when it has too little."""
        ...

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the host that the device copies to and from by itself."""
        ...

    def kv_budget(self, config: WorkerConfig, estimate: int, trial: Trial) -> int:
        """Bytes for KV, the model being loaded. estimate: of what the largest steps allocate; where that can be
        measured, ``trial`` is run instead. Raises ConfigError when nothing is left."""
        ...

    def check_room(self, kv_bytes: int, swap_bytes: int) -> None:
        """Raises ConfigError when the host's memory does not hold what of KV and swap space would be in it."""
        ...

    def reach(self, block: int) -> None:
        """KV block ``block`` is used from now on."""
        ...

    def prepare(self, trial: Trial, kv: list[torch.Tensor], late_compile: Callable[[], None]) -> None:
        """Compiles and captures all that the trial's decoder runs over ``kv`` when it serves. late_compile is called
        whenever something is compiled after that."""
        ...

    def begin(self, kernels: Kernels, kv: Sequence[torch.Tensor]) -> None:
        """Called once, by the thread that will launch, before the first step."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """A mark on a CPU: seconds of the clock."""

    at: float

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def since(self, earlier: Moment) -> float:
        return self.at - earlier.at


class Cpu:
    def __init__(self, cgroup: machine.Cgroup) -> None:
        self.where = torch.device("cpu")
        self._cgroup = cgroup
        self._pages: KvPages | None = None

    def upload(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(array)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def mark(self) -> Moment:
        return Moment(time.perf_counter())

    def aside(self, work: Callable[[], None]) -> tuple[Moment, Moment]:
        begin = self.mark()
        work()
        return begin, self.mark()

    def follow(self, mark: Mark) -> None:
        pass

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return pages.empty(shape, dtype)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def kv_budget(self, config: WorkerConfig, estimate: int, trial: Trial) -> int:
        return machine.kv_budget(config, estimate, self._cgroup)

    def check_room(self, kv_bytes: int, swap_bytes: int) -> None:
        """A host gives out more memory than it has and kills whoever uses it; so a size asked for is checked here."""
        free = machine.free_host_memory(self._cgroup)
        if kv_bytes + swap_bytes > free:
            raise ConfigError(
                f"the KV blocks asked for take {kv_bytes + swap_bytes} bytes, but {free} bytes of memory are free"
            )

    def reach(self, block: int) -> None:
        if self._pages:
            self._pages.reach(block)

    def prepare(self, trial: Trial, kv: list[torch.Tensor], late_compile: Callable[[], None]) -> None:
        pass

    def begin(self, kernels: Kernels, kv: Sequence[torch.Tensor]) -> None:
        self._pages = KvPages(kv)  # its thread is not to be kept to the place of this one
        places = machine.places(torch.get_num_threads())
        if places is None:
            return
        try:
            kernels.pin_threads(places)
        except OSError as error:
            log.warning("threads stay where the system puts them: %s", error)
