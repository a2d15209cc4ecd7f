from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from shared.errors import ConfigError
from shared.models import locate
from shared.models.gguf_file import GGUFFile
from shared.models.gguf_tokenizer import tokenizer, tokenizer_config
from tests.shared.models.build import CORPUS, SPECIALS, TEXTS, Writer, tiny, trained_byte_bpe


def byte_level(use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def digits_first() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])


@pytest.mark.parametrize(
    ("pre", "published"), [("smollm", digits_first()), ("starcoder", digits_first()), ("gpt-2", byte_level())]
)
def test_gpt2_like_vocabularies_encode_as_the_tokenizer_they_came_from(
    tmp_path: Path, pre: str, published: pre_tokenizers.PreTokenizer
) -> None:
    original = trained_byte_bpe(published)
    made = Writer(tmp_path / "m.gguf")
    made.byte_bpe(original, pre)
    converted = tokenizer(GGUFFile.read(made.close()))
    for text in [*TEXTS, *CORPUS, "<|im_start|>user\nhi<|im_end|>\n"]:
        assert converted.encode(text).ids == original.encode(text).ids, text
        assert converted.decode(converted.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "deepseek-r1-qwen"])
def test_split_vocabularies_encode_as_transformers_reads_them(tmp_path: Path, pre: str) -> None:
    made = Writer(tmp_path / "m.gguf", "qwen2" if "qwen" in pre else "llama")
    made.byte_bpe(trained_byte_bpe(byte_level()), pre, add_bos_token=False)
    path = made.close()
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    # transformers does not keep words whole that are tokens themselves; the published files of these models do.
    if pre in ("llama-bpe", "tekken"):
        theirs.model.ignore_merges = True
    converted = tokenizer(GGUFFile.read(path))
    for text in [*TEXTS, *CORPUS]:
        assert converted.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids, text


def test_numbers_split_as_each_family_does(tmp_path: Path) -> None:
    expected = {"smollm": 5, "qwen2": 5, "llama-bpe": 2, "gpt-2": 1}
    for pre, pieces in expected.items():
        made = Writer(tmp_path / f"{pre}.gguf")
        made.byte_bpe(trained_byte_bpe(byte_level()), pre)
        converted = tokenizer(GGUFFile.read(made.close()))
        assert converted.pre_tokenizer is not None
        assert len(converted.pre_tokenizer.pre_tokenize_str("12345")) == pieces, pre


def test_qwen_composes_characters_before_encoding(tmp_path: Path) -> None:
    made = Writer(tmp_path / "m.gguf", "qwen2")
    made.byte_bpe(trained_byte_bpe(byte_level()), "qwen2")
    converted = tokenizer(GGUFFile.read(made.close()))
    assert converted.encode("e\u0301").ids == converted.encode("\u00e9").ids


def test_bos_is_added_where_the_file_or_its_family_says_so(tmp_path: Path) -> None:
    cases = [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ]
    for number, (pre, stated, expected) in enumerate(cases):
        made = Writer(tmp_path / f"{number}.gguf")
        extra = {} if stated is None else {"add_bos_token": stated}
        made.byte_bpe(trained_byte_bpe(byte_level()), pre, bos_token_id=1, **extra)
        file = GGUFFile.read(made.close())
        assert (tokenizer(file).encode("hi").ids[0] == 1) is expected, (pre, stated)
        assert tokenizer(file).encode("hi", add_special_tokens=False).ids[0] != 1
        assert tokenizer_config(file)["add_bos_token"] is expected


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    original = trained_byte_bpe(byte_level())
    made = Writer(tmp_path / "m.gguf")
    tokens = [*sorted(original.get_vocab(), key=original.get_vocab().__getitem__), "<think>"]
    made.writer.add_tokenizer_model("gpt2")
    made.writer.add_tokenizer_pre("qwen2")
    made.writer.add_token_list(tokens)
    made.writer.add_token_types([3 if t in SPECIALS else 4 if t == "<think>" else 1 for t in tokens])
    made.writer.add_token_merges([" ".join(m) for m in json.loads(original.to_str())["model"]["merges"]])
    converted = tokenizer(GGUFFile.read(made.close()))
    ids = converted.encode("a<think>b<|im_end|>").ids
    assert ids == [converted.token_to_id("a"), len(tokens) - 1, converted.token_to_id("b"), 2]
    assert converted.decode(ids) == "a<think>b"
    assert converted.get_vocab_size() == len(tokens)


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def sentencepiece_file(path: Path, **extra: object) -> tuple[Path, list[str], list[float]]:
    """A file with a ``llama`` vocabulary: <unk>, <s>, </s>, 256 bytes, then pieces with scores 0, -1, -2 …"""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=.)(?=▁)"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    trained.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    vocab = sorted(trained.get_vocab().items(), key=lambda entry: entry[1])
    pieces = [piece for piece, _ in vocab if len(piece) > 1] + [piece for piece, _ in vocab if len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    made = Writer(path)
    made.writer.add_tokenizer_model("llama")
    made.writer.add_token_list(tokens)
    made.writer.add_token_scores(scores)
    made.writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces))
    made.writer.add_bos_token_id(1)
    made.writer.add_eos_token_id(2)
    for key, value in extra.items():
        made.number(f"tokenizer.ggml.{key}", value)
    return made.close(), tokens, scores


def by_scores(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's BPE as llama.cpp does it: best score first, then leftmost; bytes for the rest."""
    index = {token: i for i, token in enumerate(tokens)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[index[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in index]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        ids += [index[symbol]] if symbol in index else [index[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


def test_sentencepiece_merges_by_score_with_byte_fallback(tmp_path: Path) -> None:
    path, tokens, scores = sentencepiece_file(tmp_path / "m.gguf")
    converted = tokenizer(GGUFFile.read(path))
    for text in [t for t in [*TEXTS, *CORPUS] if t]:
        assert converted.encode(text).ids == [1, *by_scores(" " + text, tokens, scores)], text
        assert converted.decode(converted.encode(text).ids) == text


def test_sentencepiece_without_a_space_in_front(tmp_path: Path) -> None:
    path, tokens, scores = sentencepiece_file(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False)
    converted = tokenizer(GGUFFile.read(path))
    for text in [t for t in TEXTS if t]:
        assert converted.encode(text).ids == by_scores(text, tokens, scores), text
        assert converted.decode(converted.encode(text).ids) == text


# --- the built-in model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm() -> tuple[Tokenizer, Tokenizer]:
    """The built-in model's tokenizer, ours and transformers'."""
    files = locate("")
    assert files.gguf is not None
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(files.gguf))[:2])
    return Tokenizer.from_file(str(files.folder / "tokenizer.json")), theirs


def test_the_built_in_tokenizer_encodes_as_transformers_does(smollm: tuple[Tokenizer, Tokenizer]) -> None:
    ours, theirs = smollm
    # transformers leaves out the splitting of digits, which its vocabulary makes no difference to in ASCII.
    texts = [text for text in [*TEXTS, *CORPUS] if "½" not in text]
    for text in [*texts, "<|im_start|>user\nWhat is 17 + 2024?<|im_end|>\n<|im_start|>assistant\n"]:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids, text


UNENCODABLE = "\x04\x06\x13\x14\x16\x1d"
"""Control characters whose bytes SmolLM2's vocabulary lacks, and so drops, in its original form too."""


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=UNENCODABLE)))
def test_the_built_in_tokenizer_gives_back_every_text(smollm: tuple[Tokenizer, Tokenizer], text: str) -> None:
    ours, _ = smollm
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_loads_the_converted_folder_unchanged(smollm: tuple[Tokenizer, Tokenizer]) -> None:
    ours, _ = smollm
    loaded = AutoTokenizer.from_pretrained(locate("").folder)
    for text in TEXTS:
        assert loaded(text)["input_ids"] == ours.encode(text).ids
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.vocab_size) == (1, 2, 49152)
    chat = loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


# --- what cannot work ------------------------------------------------------------------------------------------------


def test_unknown_kinds_are_named_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pre-tokenizer 'martian' is not supported; supported are .*qwen2"):
        tokenizer(GGUFFile.read(tiny(tmp_path / "a.gguf", pre="martian")))
    made = Writer(tmp_path / "b.gguf")
    made.writer.add_tokenizer_model("bert")
    made.writer.add_token_list(["a"])
    with pytest.raises(ConfigError, match="tokenizer 'bert' is not supported"):
        tokenizer(GGUFFile.read(made.close()))


def test_missing_and_contradicting_parts_are_named(tmp_path: Path) -> None:
    made = Writer(tmp_path / "a.gguf")
    made.writer.add_tokenizer_model("gpt2")
    made.writer.add_tokenizer_pre("smollm")
    with pytest.raises(ConfigError, match=r"a\.gguf has no tokenizer: metadata tokenizer.ggml.merges is missing"):
        tokenizer(GGUFFile.read(made.close()))
    made = Writer(tmp_path / "b.gguf")
    made.writer.add_tokenizer_model("llama")
    made.writer.add_token_list(["a", "b"])
    made.writer.add_token_types([1, 1, 1])
    made.writer.add_token_scores([0.0, 0.0])
    with pytest.raises(ConfigError, match="2 tokens but 3 token types"):
        tokenizer(GGUFFile.read(made.close()))
