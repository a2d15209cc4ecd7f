"""Kernels for CPUs: C++ with intrinsics, compiled for what the processor can do (see ``build``) and called by ctypes."""
