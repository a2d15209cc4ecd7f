"""Where threads for computing run, as the system tells it. In a process of its own, which stays as it was put."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
from pathlib import Path

import torch

from kernels.ops import select

first, second = sorted(os.sched_getaffinity(0))[:2]
torch.set_num_threads(2)
kernels = select(torch.device("cpu"), "cpu")
kernels.pin_threads([[first], [second]])
masks = []
for task in Path("/proc/self/task").iterdir():
    lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
    masks.append(lines["Cpus_allowed_list"].strip())
assert os.sched_getaffinity(0) == {first}, os.sched_getaffinity(0)
assert str(second) in masks, masks
try:
    kernels.pin_threads([[first], [1000]])  # no such CPU here
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_each_thread_stays_on_the_cpu_that_it_is_given() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the system keeps 1 of 2 threads from their CPUs\n"
