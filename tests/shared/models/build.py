"""Small GGUF files made with the gguf package's own writer, for the tests of everything that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The capital of France is Paris, and the capital of Korea is Seoul.",
    "서울은 대한민국의 수도이며, 인구는 약 천만 명이다. 你好，世界。今天天气很好。",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)  # 12345\n",
    "Élan vital, naïve café, the the the there their then 2024 1999 365",
    "don't can't we'll I'm 😀 🎉 — “quoted”…",
] * 3

TEXTS = [
    "",
    " ",
    "The capital",
    "  two leading, trailing  ",
    "line\n\n\n  indented\r\n\ttab",
    "don't WE'LL I'm",
    "2024 12345678 ½ ٣٤ Ⅷ",
    "서울은 수도이다 你好世界 日本語 ไทย",
    "😀👩‍👩‍👧‍👦🎉",
    "x = [1, 2]; f(x)!!! ... ???",
    "naïve café",
    "HelloWorld camelCase ABCdef",
]

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def trained_byte_bpe(pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level BPE of a few hundred tokens, its first three special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def bpe_parts(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Tokens in the order of their ids, and merges as GGUF spells them."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda entry: entry[1])]
    return tokens, [" ".join(merge) for merge in model["merges"]]


class Writer:
    """A GGUF file in the making; defaults are a tiny llama of two layers."""

    def __init__(self, path: Path, arch: str = "llama", **numbers: Any) -> None:
        self.path = path
        self.arch = arch
        self.writer = gguf.GGUFWriter(path, arch)
        values = {
            "context_length": 256,
            "embedding_length": 64,
            "feed_forward_length": 96,
            "block_count": 2,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            **numbers,
        }
        for key, value in values.items():
            if value is not None:
                self.number(f"{arch}.{key}", value)
        if "attention.layer_norm_rms_epsilon" not in numbers:
            self.writer.add_layer_norm_rms_eps(1e-5)
        if "rope.freq_base" not in numbers:
            self.writer.add_rope_freq_base(10000.0)

    def number(self, key: str, value: Any) -> None:
        if isinstance(value, str):
            self.writer.add_string(key, value)
        elif isinstance(value, bool):
            self.writer.add_bool(key, value)
        elif isinstance(value, float):
            self.writer.add_float32(key, value)
        else:
            self.writer.add_uint32(key, value)

    def byte_bpe(self, tokenizer: Tokenizer, pre: str, **extra: Any) -> int:
        """Writes the vocabulary and returns its size."""
        tokens, merges = bpe_parts(tokenizer)
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre(pre)
        self.writer.add_token_list(tokens)
        self.writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
        self.writer.add_token_merges(merges)
        self.writer.add_eos_token_id(2)
        for key, value in extra.items():
            self.number(f"tokenizer.ggml.{key}", value)
        return len(tokens)

    def byte_bpe_default(self, pre: str = "smollm") -> int:
        """Writes a small byte-level vocabulary and returns its size."""
        return self.byte_bpe(trained_byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)), pre)

    def tensor(self, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType | None = None) -> None:
        """Adds float32 values, quantised to ``kind`` by the gguf package, or bytes that are ``kind`` blocks already."""
        if kind is None or kind == gguf.GGMLQuantizationType.F32 or values.dtype == np.uint8:
            self.writer.add_tensor(name, values, raw_dtype=kind if values.dtype == np.uint8 else None)
        else:
            packed = gguf.quants.quantize(values, kind)
            self.writer.add_tensor(name, packed, raw_dtype=kind)

    def close(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


def tiny(path: Path, *, pre: str = "smollm", embedding: bool = True, **numbers: Any) -> Path:
    """A tiny file with a tokenizer and no layers: enough for everything but weights."""
    made = Writer(path, **numbers)
    size = made.byte_bpe_default(pre)
    if embedding:
        made.tensor("token_embd.weight", np.zeros((size, 64), np.float32))
    return made.close()
