"""What int8 weights cost in quality: perplexity and greedy agreement against the model's own dtype, on a fixed text.

    python -m benchmarks.quantization [--model MODEL] [--text FILE] [--tokens N]

The text is cut into windows of 512 tokens. Teacher-forced: both see the same tokens, and each position tells whether
their likeliest next tokens are equal. Free-running: both continue each window's first half greedily for 64 tokens, and
what counts is the share of tokens before the first difference.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from kernels.decoder import Batch
from kernels.ops import select
from services.worker.machine import pick_dtype
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.weights import load_weights
from shared.models import ModelFiles, locate

ROOT = Path(__file__).parents[1]
WINDOW, CONTINUED, BLOCK = 512, 64, 16
CPU = torch.device("cpu")


class Model:
    """One sequence at a time, in blocks 1, 2, 3 ..."""

    def __init__(self, files: ModelFiles, quantization: str) -> None:
        config, dtype = ModelConfig.load(files.folder), pick_dtype("auto", CPU)
        self._decoder = Decoder(config, WINDOW + CONTINUED, dtype, CPU, select(CPU, "cpu", quantization))
        self._decoder.load(load_weights(files, dtype))
        blocks = (WINDOW + CONTINUED) // BLOCK
        shape = (blocks + 1, 2, config.num_kv_heads, BLOCK, config.head_dim)
        self._kv = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
        self._table = torch.arange(1, blocks + 1, dtype=torch.int32)[None]

    @torch.inference_mode()
    def logits(self, ids: list[int], start: int = 0) -> torch.Tensor:
        """[len(ids), vocabulary] float32 of tokens at start, start + 1, ... after those of earlier calls."""
        positions = torch.arange(start, start + len(ids))
        none = torch.empty(0, dtype=torch.int32)
        batch = Batch(
            tokens=torch.tensor(ids),
            positions=positions,
            slot_mapping=positions + BLOCK,
            decode_tables=self._table[:0],
            decode_lens=none,
            chunk_tables=self._table,
            chunk_cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
            chunk_lens=torch.tensor([start + len(ids)], dtype=torch.int32),
        )
        return self._decoder.step(batch, self._kv, torch.arange(len(ids)))[0].float()

    def continued(self, ids: list[int]) -> list[int]:
        out = [int(self.logits(ids)[-1].argmax())]
        while len(out) < CONTINUED:
            out.append(int(self.logits(out[-1:], len(ids) + len(out) - 1)[-1].argmax()))
        return out


def same_before_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="as for quire serve; default: the built-in model")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "protocol.md")
    parser.add_argument("--tokens", type=int, default=8 * WINDOW)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    files = locate(args.model)
    ids = Tokenizer.from_file(str(files.folder / "tokenizer.json")).encode(args.text.read_text()).ids[: args.tokens]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if not windows:
        parser.error(f"{args.text} has {len(ids)} tokens, fewer than {WINDOW}")
    exact, rounded = Model(files, "none"), Model(files, "int8")
    losses, agreed, same = [0.0, 0.0], 0, 0
    for window in windows:
        logits = [model.logits(window)[:-1] for model in (exact, rounded)]
        for i in range(2):
            losses[i] += float(F.cross_entropy(logits[i], torch.tensor(window[1:]))) / len(windows)
        agreed += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
        half = window[: WINDOW // 2]
        same += same_before_difference(exact.continued(half), rounded.continued(half))
    perplexities = [float(torch.tensor(loss).exp()) for loss in losses]
    print(f"{files.name}, {len(windows)} windows of {WINDOW} tokens of {args.text.name}")
    print(
        f"perplexity: {perplexities[0]:.3f}; int8 {perplexities[1]:.3f} ({perplexities[1] / perplexities[0] - 1:+.2%})"
    )
    print(f"same likeliest next token, teacher-forced: {agreed / (len(windows) * (WINDOW - 1)):.1%}")
    print(f"same greedy tokens before the first difference: {same / (len(windows) * CONTINUED):.1%} of {CONTINUED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
