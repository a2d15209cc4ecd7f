"""Loading weights by name: what is missing, unknown or misshapen is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.ops import select
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from shared.errors import ConfigError
from tests.services.worker import random_models

CPU = torch.device("cpu")


def decoder(folder: Path, **changes: Any) -> tuple[Decoder, dict[str, torch.Tensor]]:
    model = random_models.save(folder, "llama", **changes)
    return Decoder(ModelConfig.load(folder), 64, torch.float32, CPU, select(CPU, "reference")), dict(model.state_dict())


def test_a_missing_weight(tmp_path: Path) -> None:
    ours, weights = decoder(tmp_path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"the weights lack model\.layers\.1\.mlp\.up_proj\.weight$"):
        ours.load(weights.items())


def test_an_unknown_weight(tmp_path: Path) -> None:
    ours, weights = decoder(tmp_path)
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)
    with pytest.raises(ConfigError, match=r"hold model\.layers\.0\.self_attn\.q_proj\.bias, which a LlamaForCausalLM"):
        ours.load(weights.items())


def test_a_misshapen_weight(tmp_path: Path) -> None:
    ours, weights = decoder(tmp_path)
    weights["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(96, 96)
    with pytest.raises(ConfigError, match=r"k_proj\.weight has shape \(96, 96\); config\.json makes it \(32, 96\)"):
        ours.load(weights.items())


def test_a_second_copy_of_tied_weights_and_old_rotary_buffers_are_passed_over(tmp_path: Path) -> None:
    ours, weights = decoder(tmp_path, tie_word_embeddings=True)
    weights["lm_head.weight"] = torch.zeros(1)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)
    ours.load(weights.items())
    assert torch.equal(ours.embedding, weights["model.embed_tokens.weight"])
