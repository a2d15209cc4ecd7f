"""tokenizer.json and tokenizer_config.json from a GGUF file's vocabulary, merges, scores and token types.

Two kinds exist: ``gpt2`` (byte-level BPE, split first by a pre-tokenizer that the file only names) and ``llama``
(SentencePiece BPE, by scores, with byte fallback). Both follow llama.cpp's ``llama-vocab.cpp`` in what they do and the
models' original tokenizer.json files in how it is written down.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from shared.errors import ConfigError
from shared.models.gguf_file import GGUFFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPECIAL = (_UNKNOWN, _CONTROL)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""Pre-tokenizers that are one regular expression."""

_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""Pre-tokenizers that take digits one by one and then split as GPT-2 does."""

_GPT2 = ("gpt-2", "gpt2", "default", "phi-2", "olmo", "mpt", "jais")

_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Vocabularies in which a word that is itself a token is never built from merges; they also begin texts with BOS."""

_COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Models trained on text in Unicode normal form C."""


def tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of ``file``. Raises ConfigError when its kind or pre-tokenizer is unknown or parts are missing."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        made = _byte_level(file)
    elif kind == "llama":
        made = _sentencepiece(file)
    else:
        raise ConfigError(f"{file.path}: tokenizer {kind!r} is not supported; gpt2 and llama are")
    tokens, kinds = _tokens(file), _kinds(file)
    # Ids are those of the vocabulary, which holds these tokens already; adding them makes them match before all else.
    made.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, kinds, strict=True)
            if k in _SPECIAL and t
        ]
    )
    made.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, k in zip(tokens, kinds, strict=True)
            if k == _USER_DEFINED and t
        ]
    )
    return made


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """tokenizer_config.json of ``file``, its chat template included."""
    tokens = _tokens(file)
    made: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(file, "bos"),
        "add_eos_token": _adds(file, "eos"),
        "model_max_length": file.metadata.get(f"{file.architecture()}.context_length", 1 << 30),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            made[f"{name}_token"] = tokens[index]
    if "tokenizer.chat_template" in file.metadata:
        made["chat_template"] = file.metadata["tokenizer.chat_template"]
    return made


def _byte_level(file: GGUFFile) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in _list(file, "merges")]
    try:
        model = BPE(vocab=_vocabulary(file), merges=merges, ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:  # the library's own message says which merge is at fault
        raise ConfigError(f"{file.path}: its tokenizer's merges do not fit its tokens: {error}") from error
    made = Tokenizer(model)
    if pre in _SPLITS:
        steps = [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    elif pre in _DIGITS:
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    elif pre in _GPT2:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        known = ", ".join((*_SPLITS, *_DIGITS, *_GPT2))
        raise ConfigError(f"{file.path}: pre-tokenizer {pre!r} is not supported; supported are {known}")
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre in _COMPOSED:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.post_processor = _post_processor(file, [processors.ByteLevel(trim_offsets=False)])
    return made


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    tokens, kinds = _tokens(file), _kinds(file)
    scores = _list(file, "scores")
    if len(scores) != len(tokens):
        raise ConfigError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
    unknown = next((t for t, k in zip(tokens, kinds, strict=True) if k == _UNKNOWN), None)
    vocabulary = _vocabulary(file)
    made = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, tokens, kinds, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    made.decoder = decoders.Sequence(steps)
    made.post_processor = _post_processor(file, [])
    return made


def _merges(
    vocabulary: dict[str, int], tokens: list[str], kinds: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best first: SentencePiece merges whatever pair scores highest.

    Pairs that make the same token have one score; among them the one of earlier tokens goes first, as in the
    tokenizer.json files that Llama models are published with.
    """
    skipped = (*_SPECIAL, _USER_DEFINED, _BYTE)
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        if kind in skipped:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-score, left, right, token[:cut], token[cut:]))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _post_processor(file: GGUFFile, first: list[Any]) -> Any:
    """Adds BOS and EOS around a text where the file says so."""
    tokens = _tokens(file)
    single, ids = ["$A"], []
    for name in ("bos", "eos"):
        index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not _adds(file, name) or index is None or index >= len(tokens):
            continue
        single = [tokens[index], *single] if name == "bos" else [*single, tokens[index]]
        ids.append((tokens[index], index))
    steps = list(first)
    if ids:
        pair = [*single, *(f"{part}:1" for part in single)]
        pair = [part if part != "$A:1" else "$B:1" for part in pair]
        steps.append(processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids))
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else processors.Sequence(steps)


def _adds(file: GGUFFile, name: str) -> bool:
    stated = file.metadata.get(f"tokenizer.ggml.add_{name}_token")
    if stated is not None:
        return bool(stated)
    if name == "eos":
        return False
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "default")
    return kind == "llama" or pre in _WHOLE_WORDS


def _list(file: GGUFFile, key: str) -> list[Any]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{file.path} has no tokenizer: metadata tokenizer.ggml.{key} is missing or empty")
    return value


def _tokens(file: GGUFFile) -> list[str]:
    return _list(file, "tokens")


def _kinds(file: GGUFFile) -> list[int]:
    tokens = _tokens(file)
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ConfigError(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    return list(kinds)


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    return {token: index for index, token in enumerate(_tokens(file))}
