"""Our decoder against transformers in float32: every architecture, every RoPE scaling, alone and batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.ops import select
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from tests.services.worker import forward, random_models
from tests.services.worker.plans import Driver

CPU = torch.device("cpu")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama no groups": ("llama", {"num_key_value_heads": 6}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "llama",
        {
            "hidden_size": 144,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_theta": 100000.0,
            "rms_norm_eps": 1e-5,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {"rope_theta": 1000000.0}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3 bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 80,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "longrope": (
        "llama",
        {
            "max_position_embeddings": 90,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + i / 10 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def named(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return MODELS[request.param]


def test_logits_and_greedy_tokens_equal_transformers(tmp_path: Path, named: tuple[str, dict[str, Any]]) -> None:
    kind, changes = named
    model = random_models.save(tmp_path, kind, **changes)
    config = ModelConfig.load(tmp_path)
    decoder = Decoder(config, config.max_model_len(None), torch.float32, CPU, select(CPU, "reference"))
    decoder.load(model.state_dict().items() if not config.tied else _without_head(model))
    ids = random_models.prompts(75)[0]
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(forward.logits(decoder, ids, [75]), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(forward.logits(decoder, ids, [1, 30, 17, 3]), wanted, rtol=0, atol=1e-4)

    executor = random_models.executor(tmp_path)
    prompts = random_models.prompts(1, 5, 16, 33, 64, 70)
    oracle = [random_models.generate(model, prompt, 16) for prompt in prompts]
    sizes = [7, 3, 16, 33, 1, 50]
    together = Driver(executor, chunks=lambda i: sizes[i % len(sizes)], budget=60, seed=1).generate(prompts, 16)
    assert together == oracle
    alone = Driver(executor, seed=2)
    assert [alone.generate([prompt], 16, at_once=1)[0] for prompt in prompts[::2]] == oracle[::2]


def test_longrope_beyond_the_original_context(tmp_path: Path) -> None:
    changes = MODELS["longrope"][1] | {"max_position_embeddings": 200}
    model = random_models.save(tmp_path, "llama", **changes)
    config = ModelConfig.load(tmp_path)
    decoder = Decoder(config, config.max_model_len(None), torch.float32, CPU, select(CPU, "reference"))
    decoder.load(model.state_dict().items())
    ids = random_models.prompts(150)[0]
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(forward.logits(decoder, ids, [150]), wanted, rtol=0, atol=1e-4)


def _without_head(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
