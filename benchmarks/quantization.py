"""What quantised weights cost in quality, on a text: perplexity and greedy agreement with the model's own dtype.

    python -m benchmarks.quantization [--model MODEL] [--text FILE] [--tokens N] [int8 int4 gguf]

The text is cut into windows of 512 tokens. Teacher-forced: both see the same tokens, and each position tells whether
their likeliest next tokens are equal. Free-running: both continue each window's first half greedily for 64 tokens, and
what counts is the share of tokens before the first difference. float32 stands for what bf16 itself costs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
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
METHODS = ("float32", "int8", "int4", "gguf")


class Model:
    """One sequence at a time, in blocks 1, 2, 3 ..."""

    def __init__(self, files: ModelFiles, quantization: str) -> None:
        """quantization: as for the server, or float32: none, in that dtype."""
        config = ModelConfig.load(files.folder)
        dtype = torch.float32 if quantization == "float32" else pick_dtype("auto", CPU)
        self._decoder = Decoder(config, WINDOW + CONTINUED, dtype, CPU, select(CPU, "cpu"), quantization)
        self._decoder.load(load_weights(files, dtype, keep_blocks=quantization == "gguf"))
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


def mean_perplexity(logits: list[torch.Tensor], windows: list[list[int]]) -> float:
    losses = [float(F.cross_entropy(a, torch.tensor(window[1:]))) for a, window in zip(logits, windows, strict=True)]
    return math.exp(statistics.mean(losses))


def same_before_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help=f"which of {', '.join(METHODS)} (default: all)")
    parser.add_argument("--model", default="", help="as for quire serve; default: the built-in model")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "protocol.md")
    parser.add_argument("--tokens", type=int, default=8 * WINDOW)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    torch.set_num_threads(args.threads)
    files = locate(args.model)
    ids = Tokenizer.from_file(str(files.folder / "tokenizer.json")).encode(args.text.read_text()).ids[: args.tokens]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if not windows:
        parser.error(f"{args.text} has {len(ids)} tokens, fewer than {WINDOW}")
    exact = Model(files, "none")
    halves = [window[: WINDOW // 2] for window in windows]
    logits, continued = [exact.logits(window)[:-1] for window in windows], [exact.continued(half) for half in halves]
    perplexity = mean_perplexity(logits, windows)
    print(f"{files.name}, {len(windows)} windows of {WINDOW} tokens of {args.text.name}")
    print(f"{'':<10} {'perplexity':>10} {'change':>8} {'same next':>10} {'same greedy':>12}")
    print(f"{'none':<10} {perplexity:10.3f}")
    for method in args.methods or METHODS:
        model = Model(files, method)
        theirs = [model.logits(window)[:-1] for window in windows]
        agreed = statistics.mean(
            float((a.argmax(-1) == b.argmax(-1)).float().mean()) for a, b in zip(logits, theirs, strict=True)
        )
        same = statistics.mean(
            same_before_difference(a, model.continued(half)) / CONTINUED
            for a, half in zip(continued, halves, strict=True)
        )
        found = mean_perplexity(theirs, windows)
        print(f"{method:<10} {found:10.3f} {found / perplexity - 1:+8.2%} {agreed:10.1%} {same:12.1%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
