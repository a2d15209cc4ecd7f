"""A model's tokenizer as loaded from its folder: text to ids, ids to pieces, and its chat template.

``tokenizer.json`` is read by the ``tokenizers`` library directly: importing transformers takes three seconds and all
of torch. What transformers adds on top of that file (special tokens that only ``tokenizer_config.json`` names) is
applied here; ``add_bos_token`` there has no effect in either, as the file's own post-processor decides. Tests hold both
to equal ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.tokenizer.detokenizer import Pieces
from services.tokenizer.parsers.output import NO_FORMAT, OutputFormat
from services.tokenizer.template import ChatTemplate
from shared.errors import ConfigError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONVERT_TIMEOUT = 120  # seconds
_CONVERTER = """\
import sys
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
"""


class Tokenizer:
    """Thread-safe. max_chars_per_token: no token stands for more characters of input (None: unknown).

    format: how the model writes tool calls and reasoning. specials: the texts of named special tokens, for templates.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        format: OutputFormat = NO_FORMAT,
        specials: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.format = format
        self.specials = dict(specials or {})
        self.bos_id = bos_id
        self._template, self._tool_template = template, tool_template
        self.pieces = Pieces(backend)
        self.max_chars_per_token = self._longest() if self.pieces.byte_level or self.pieces.byte_fallback else None

    @classmethod
    def load(
        cls, folder: Path, chat_template: str = "", *, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> Tokenizer:
        """Reads a model folder. Raises ConfigError.

        chat_template: a template to use instead of the model's, or a file with one. tool_parser, reasoning_parser: as
        ``OutputFormat.choose`` takes them.
        """
        file = folder / "tokenizer.json"
        config = _read_json(folder / "tokenizer_config.json")
        named = {**_read_json(folder / "special_tokens_map.json"), **config}
        specials = {name: _content(named[name]) for name in _NAMED if named.get(name) is not None}
        if file.exists():
            backend = _from_file(file)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                backend = _from_file(_convert(folder, Path(scratch)))
        _add_tokens(backend, config, list(specials.values()))
        sources = _templates(folder, config)
        if chat_template:
            sources = {"default": _given(chat_template)}
        compiled = {name: ChatTemplate(source, specials) for name, source in sources.items()}
        bos = specials.get("bos_token")
        return cls(
            backend,
            bos_id=backend.token_to_id(bos) if bos else None,
            template=compiled.get("default"),
            tool_template=compiled.get("tool_use"),
            format=OutputFormat.choose(
                tool_parser,
                reasoning_parser,
                "".join(sources.values()),
                any(template.knows_tools for template in compiled.values()),
                backend.token_to_id,
            ),
            specials=specials,
        )

    def encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """The encoding, whose ``len`` is cheap and whose ``ids`` are a list made on demand.

        Raises TypeError for text that is not valid Unicode. As a batch of one, because only batches are encoded with
        the GIL released, and without offsets, which nobody reads.
        """
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def encode_part(self, text: str, add_special_tokens: bool, keep: int, side: str) -> tokenizers.Encoding:
        """As ``encode``, but for tokens that are cut off from ``side``, left or right, until there are ``keep``.

        Those that are added (a BOS) are kept, as transformers keeps them.
        """
        encoding = self.encode(text, False)
        added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(keep - added, 0), direction=side)
        return self._backend.post_process(encoding, None, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_strs(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id; empty for one outside it."""
        return [self._backend.id_to_token(id) or "" for id in ids]

    def token_to_id(self, token: str) -> int | None:
        """The id of a token that is spelled so in the vocabulary."""
        return self._backend.token_to_id(token)

    def template_for(self, tools: Any) -> ChatTemplate | None:
        return self._tool_template if tools and self._tool_template is not None else self._template

    def _longest(self) -> int:
        # Bytes, not characters: a byte-level token of B bytes is at most B characters, and the estimate is a bound.
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        longest = max((len(token.encode()) for token in vocabulary), default=1)
        # Canonical composition (NFC) can join up to three characters before the vocabulary sees them; others join more.
        return longest * (1 if self._backend.normalizer is None else 4)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _from_file(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _convert(folder: Path, into: Path) -> Path:
    """tokenizer.json made by transformers from an older format, in a process of its own: it would import torch."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CONVERTER, str(folder), str(into)],
            capture_output=True,
            text=True,
            timeout=_CONVERT_TIMEOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{folder}: its tokenizer was not converted within {_CONVERT_TIMEOUT} s") from error
    file = into / "tokenizer.json"
    if done.returncode or not file.exists():
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else "it has no fast form"
        raise ConfigError(f"{folder} has no tokenizer.json, and its tokenizer cannot be converted: {why}")
    return file


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], named: list[str]) -> None:
    """Registers tokens that only the configuration knows as added ones (split off before encoding, skippable)."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if entry["content"] not in present:
            backend.add_tokens([tokenizers.AddedToken(**{k: v for k, v in entry.items() if not k.startswith("__")})])
            present.add(entry["content"])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = [_content(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
    for token in [*named, *more]:
        # A named token that is not in the vocabulary would get an id the model has no row for.
        if token not in present and backend.token_to_id(token) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
            present.add(token)


def _given(chat_template: str) -> str:
    """What ``--chat-template`` stands for: a file's text, or itself where it is no name of a file but Jinja."""
    if any(character in chat_template for character in "{}\n"):
        return chat_template
    try:
        return Path(chat_template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {chat_template}: {error}") from error


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template sources by name; ``default`` is the usual one."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return {"default": file.read_text()}
    found = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    return dict(found) if isinstance(found, dict) else {}
