"""Small real tokenizers, trained on the spot, in Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The capital of France is Paris, and the capital of Korea is Seoul.",
    "Paged memory holds the keys and values of every token in blocks.",
    "def add(a, b):\n    return a + b\n",
    "안녕하세요, 세계! 日本語のテキスト。 Ünïcödé 😀🚀",
] * 4

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant", "tool"] -%}
{{ raise_exception("unknown role " + message.role) }}
{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def byte_level() -> Tokenizer:
    """GPT-2-like; ids 0 and 1 are special, the last one is an added token that is not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=419,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool→>", normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama-2-like: <unk>, <s>, </s>, 256 byte tokens, then characters and words with ▁ for the space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, limit_alphabet=60, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    # The trainer marks the byte tokens as special, which they are not.
    page = json.loads(tokenizer.to_str())
    page["added_tokens"] = [token for token in page["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(page))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, *, template: str | None = TEMPLATE, **config: object) -> Path:
    """A model folder with this tokenizer, a template and just enough of a model to be located."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    page = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template is not None:
        page["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(page))
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(model))
    save_file({"model.norm.weight": np.ones(4, dtype=np.float32)}, folder / "model.safetensors")
    return folder
