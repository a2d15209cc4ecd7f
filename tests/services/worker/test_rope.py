"""Rotary tables of every scaling against transformers' frequencies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.models.rope import Rope
from shared.errors import ConfigError

HEAD_DIM = 64
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024, "truncate": False, "beta_fast": 16},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.5},
]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 100 for i in range(HEAD_DIM // 2)],
    "long_factor": [2.0 + i / 10 for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": 1024,
}


def config(params: dict[str, Any], max_position: int = 4096) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": 50000.0, **params},
    )


def oracle(params: dict[str, Any], length: int, seq_len: int | None = None) -> torch.Tensor:
    frequencies, factor = ROPE_INIT_FUNCTIONS[params["rope_type"]](config(params), torch.device("cpu"), seq_len=seq_len)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies.double()
    return torch.cat([angles.cos(), angles.sin()], dim=1) * factor


def ours(params: dict[str, Any], length: int, max_position: int = 4096) -> torch.Tensor:
    return Rope.parse({"rope_theta": 50000.0, **params}, HEAD_DIM, max_position).table(length)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    # float32 angles of a thousand radians are good to 1e-4
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=5e-4)


def test_default_is_the_formula_of_the_paper() -> None:
    positions = torch.arange(100, dtype=torch.float64)[:, None]
    angles = positions * 50000.0 ** (-torch.arange(HEAD_DIM // 2, dtype=torch.float64) * 2 / HEAD_DIM)
    close(ours({}, 100), torch.cat([angles.cos(), angles.sin()], dim=1))


@pytest.mark.parametrize("params", SCALINGS, ids=lambda p: p["rope_type"])
def test_scalings(params: dict[str, Any]) -> None:
    close(ours(params, 1000), oracle(params, 1000))


@pytest.mark.parametrize(("length", "seq_len"), [(1024, 1024), (1025, 1025)])
def test_longrope_chooses_by_the_longest_sequence(length: int, seq_len: int) -> None:
    close(ours(LONGROPE, length), oracle(LONGROPE, length, seq_len))


def test_dynamic_rotates_each_token_by_the_length_it_was_decoded_at() -> None:
    params = {"rope_type": "dynamic", "factor": 3.0}
    table = ours(params, 600, max_position=256)
    for position in (0, 100, 255, 256, 400, 599):
        frequencies, factor = ROPE_INIT_FUNCTIONS["dynamic"](
            config(params, 256), torch.device("cpu"), seq_len=position + 1
        )
        angles = position * frequencies.double()
        close(table[position], torch.cat([angles.cos(), angles.sin()]) * factor)


@pytest.mark.parametrize(
    ("params", "max_position", "limit"),
    [
        ({}, 2048, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 2048, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 2048, 4096),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}, 131072, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        (LONGROPE, 4096, 4096),
    ],
)
def test_longest_sequence(params: dict[str, Any], max_position: int, limit: int) -> None:
    assert Rope.parse(params, HEAD_DIM, max_position).limit == limit


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_both_spellings_of_the_type(name: str) -> None:
    assert Rope.parse({name: "linear", "factor": 2.0}, HEAD_DIM, 128).kind == "linear"
    assert Rope.parse({**LONGROPE, "rope_type": None, name: "su"}, HEAD_DIM, 128).kind == "longrope"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rope_type": "spiral"}, "'spiral' is not supported; supported: default, linear"),
        ({"rope_type": "linear"}, "rope_type 'linear' needs 'factor'"),
        ({**LONGROPE, "long_factor": [1.0]}, "long_factor has 1 entries, not 32"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_cannot_work_is_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rope.parse(params, HEAD_DIM, 128)
