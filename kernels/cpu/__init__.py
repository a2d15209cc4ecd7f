"""Kernels for CPUs: C++ with intrinsics, compiled for what the processor can do (see ``build``), called by ctypes."""

from kernels.cpu.kernels import CpuKernels, check_kv, load

__all__ = ["CpuKernels", "check_kv", "load"]
