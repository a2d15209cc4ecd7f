"""Small random models of every architecture, saved as Hugging Face folders, with transformers' own as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from services.worker.config import WorkerConfig
from services.worker.model_executor import ModelExecutor

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save(folder: Path, kind: str, **changes: Any) -> Any:
    """Writes a random model to ``folder`` and returns transformers' float32 instance of it.

    Weights are large enough that attention, positions and biases decide the logits, biases and norms included.
    """
    torch.set_num_threads(1)  # threads only get in each other's way with models this small
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**SHAPE | changes)).float().eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.12)
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return model


def executor(folder: Path, **changes: Any) -> ModelExecutor:
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 160,
    }
    return ModelExecutor(WorkerConfig(model=str(folder), **options | changes))


def prompts(*lengths: int, vocab_size: int = 320) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def generate(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """transformers' greedy continuation, not ended by EOS."""
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(ids[0, len(prompt) :].tolist())
