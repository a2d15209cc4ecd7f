"""transformers looks for another package called ``kernels``; it must not take ours for it, nor trip over it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import kernels, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.utils import is_kernels_available

assert kernels.__file__ == {ours!r}, kernels.__file__
assert not is_kernels_available()
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
config.save_pretrained({folder!r})
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({folder!r}))
ids = model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
assert ids.shape == (1, 5)
from kernels.ops import select
assert select(torch.device("cpu"), "reference").silu_mul(torch.zeros(1, 2)).shape == (1, 1)
"""


def test_transformers_runs_a_model_beside_our_package(tmp_path: Path) -> None:
    script = SCRIPT.format(ours=str(ROOT / "kernels" / "__init__.py"), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_no_distribution_is_called_kernels() -> None:
    # transformers takes the version of a distribution of that name for the version of the package it looks for
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")
