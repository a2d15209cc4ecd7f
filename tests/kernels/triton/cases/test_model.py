"""A whole model on these kernels generates the tokens that it generates on the reference's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.errors import ConfigError
from shared.sampling import SamplingParams
from tests.services.worker import random_models
from tests.services.worker.plans import GREEDY, Driver

SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_tokens_of_the_reference(kind: str, tmp_path: Path, device: torch.device) -> None:
    """Chunked prompts and decodes together; Mistral's window is shorter than the prompt, Qwen3's heads are normed."""
    random_models.save(tmp_path, kind, **({"sliding_window": 16} if kind == "mistral" else {}))
    prompts, params = random_models.prompts(24, 3), [GREEDY, SAMPLED]
    generated = {}
    for backend in ("reference", "triton"):
        executor = random_models.executor(tmp_path, device=device.type, attention_backend=backend)
        driver = Driver(executor, chunks=lambda i: 5 + i % 17)
        generated[backend] = driver.generate(prompts, 3, params)
    assert generated["triton"] == generated["reference"]


def test_a_block_size_that_the_kernels_do_not_take_is_refused_before_loading(tmp_path: Path) -> None:
    random_models.save(tmp_path, "llama")
    with pytest.raises(
        ConfigError, match="the triton kernels do not run this: block size 8: these kernels take 16, 32"
    ):
        random_models.executor(tmp_path, attention_backend="triton", block_size=8)
