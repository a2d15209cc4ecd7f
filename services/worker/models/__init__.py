"""The decoder-only transformers this worker runs, written on ``kernels.ops``."""
