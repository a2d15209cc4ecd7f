"""The Hugging Face folder of a GGUF file: everything about the model but its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.models import gguf_config, gguf_tokenizer
from shared.models.cache import locked, new_folder
from shared.models.gguf_file import GGUFFile

_LAYOUT = 1
"""Raised whenever what is written here changes, so that folders of older versions are made anew."""

_SOURCE = "source.json"


def convert(path: Path, root: Path, digest: str = "") -> tuple[Path, str]:
    """The folder of the GGUF file at ``path`` below ``root``, made if it is not there, and the model's digest.

    The folder is keyed by the file's path, size and time of change, so finding it again costs one stat; or by
    ``digest`` where the caller knows it, which also replaces the one computed from the header. (Copies keep neither
    path nor the whole time: layers of an image cut it to seconds.) Raises ConfigError for files that cannot be served.
    """
    path = path.resolve()
    status = path.stat()
    known = digest or f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    identity = f"{_LAYOUT}\0{known}"
    folder = root / "gguf" / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    source = folder / _SOURCE
    if not source.exists():
        with locked(folder):
            if not source.exists():
                _write(path, folder, digest)
    return folder, str(json.loads(source.read_text())["digest"])


def _write(path: Path, folder: Path, digest: str) -> None:
    file = GGUFFile.read(path)
    try:
        parts: dict[str, Any] = {
            "config.json": gguf_config.config(file),
            "generation_config.json": gguf_config.generation_config(file),
            "tokenizer_config.json": gguf_tokenizer.tokenizer_config(file),
            _SOURCE: {"path": str(path), "digest": digest or file.digest},
        }
        made = gguf_tokenizer.tokenizer(file)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:  # metadata of other types than they have
        raise ConfigError(f"{path}: its metadata does not describe a model: {error}") from error
    try:
        with new_folder(folder) as part:
            for name, content in parts.items():
                (part / name).write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
            made.save(str(part / "tokenizer.json"))
    except OSError as error:
        raise ConfigError(f"cannot write the converted model to {folder}: {error.strerror}") from error
