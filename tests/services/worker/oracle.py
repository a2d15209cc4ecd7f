"""transformers' own forward of the built-in model, and what it would have generated greedily."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.worker.weights import load_weights
from shared.models import ModelFiles


def builtin(files: ModelFiles) -> Any:
    """transformers' model in float32 with the weights as we read them, in a second; transformers' own way takes ten.

    ``test_weights`` holds each of them to what transformers reads, bit for bit.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(files.folder), dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(dict(load_weights(files, torch.float32)), strict=False)
    assert (set(missing), set(unexpected)) == ({"lm_head.weight"}, set())  # tied to the embedding
    return model


@torch.inference_mode()
def follow(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits [len(output), vocab] after the prompt and after each of the output's tokens but its last.

    Where their argmax is the output, the output is the greedy continuation: told by one forward instead of one a token.
    """
    ids = torch.tensor([prompt + output[:-1]])
    logits: torch.Tensor = model(ids, logits_to_keep=len(output), use_cache=False).logits[0]
    return logits
