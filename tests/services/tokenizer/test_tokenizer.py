"""Tokenizers loaded from folders against transformers' AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

from services.tokenizer.tokenizer import Tokenizer
from shared.errors import ConfigError
from tests.services.tokenizer import toy

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces \n\n and lines\t",
    "안녕하세요 日本語 naïve 😀👨‍👩‍👧",
    "<|im_start|>user\nx<|im_end|> <s> </s> <unk> [EXTRA]",
    "def f(x):\n    return x ** 2  # ∑",
    "a" * 300,
]


def agree(folder: Path) -> Tokenizer:
    ours, oracle = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            expected = oracle(text, add_special_tokens=special)["input_ids"]
            ids = ours.encode(text, special).ids
            assert ids == expected, text
            for skip in (True, False):
                shown = oracle.decode(expected, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip) == shown
    assert ours.bos_id == oracle.bos_token_id
    return ours


def test_the_built_in_model(builtin_folder: Path) -> None:
    agree(builtin_folder)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        {"bos_token": "<|im_start|>", "add_bos_token": True},
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": True, "add_eos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True}},
        {"added_tokens_decoder": {"400": {"content": "[EXTRA]", "special": True, "lstrip": True}}},
    ],
)
def test_byte_level(tmp_path: Path, byte_level: Library, config: dict[str, object]) -> None:
    agree(toy.save(tmp_path, Library.from_str(byte_level.to_str()), **config))


@pytest.mark.parametrize("config", [{}, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}])
def test_byte_fallback(tmp_path: Path, byte_fallback: Library, config: dict[str, object]) -> None:
    agree(toy.save(tmp_path, Library.from_str(byte_fallback.to_str()), **config))


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path, byte_level: Library) -> None:
    library = Library.from_str(byte_level.to_str())
    library.enable_truncation(4)
    library.enable_padding(length=8)
    assert (
        Tokenizer.load(toy.save(tmp_path, library)).encode("abcdefghij", False).ids
        == byte_level.encode("abcdefghij").ids
    )


def test_an_older_format_is_converted(tmp_path: Path, byte_level: Library) -> None:
    """vocab.json and merges.txt, as GPT-2 has them, and no tokenizer.json."""
    folder = toy.save(tmp_path, byte_level, tokenizer_class="GPT2Tokenizer", bos_token="<|im_start|>")
    (folder / "tokenizer.json").unlink()
    byte_level.model.save(str(folder))
    converted = Tokenizer.load(folder)
    assert converted.encode("Hello 안녕", False).ids == byte_level.encode("Hello 안녕").ids


def test_the_longest_token_bounds_the_characters(byte_level: Library, builtin: Tokenizer, chatty: Tokenizer) -> None:
    assert chatty.max_chars_per_token is not None and builtin.max_chars_per_token is not None
    for text in TEXTS:
        assert len(builtin.encode(text, False)) * builtin.max_chars_per_token >= len(text)
        assert len(chatty.encode(text, False)) * chatty.max_chars_per_token >= len(text)


def test_templates_by_name_and_by_file(tmp_path: Path, byte_level: Library) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = toy.save(tmp_path / "named", byte_level, template=None, chat_template=named)
    loaded = Tokenizer.load(folder)
    plain, tools = loaded.template_for(None), loaded.template_for([{}])
    assert plain is not None and plain.render([], {}) == "D"
    assert tools is not None and tools.render([], {}) == "T"
    (folder / "chat_template.jinja").write_text("J")
    from_file = Tokenizer.load(folder).template_for(None)
    assert from_file is not None and from_file.render([], {}) == "J"
    (tmp_path / "own.jinja").write_text("O")
    own = Tokenizer.load(folder, str(tmp_path / "own.jinja")).template_for(None)
    assert own is not None and own.render([], {}) == "O"
    assert Tokenizer.load(toy.save(tmp_path / "none", byte_level, template=None)).template_for(None) is None


def test_what_cannot_be_loaded(tmp_path: Path, byte_level: Library) -> None:
    folder = toy.save(tmp_path, byte_level)
    with pytest.raises(ConfigError, match=r"--chat-template .*missing.jinja"):
        Tokenizer.load(folder, str(tmp_path / "missing.jinja"))
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="cannot be converted"):
        Tokenizer.load(folder)
