"""Models named by a Hugging Face hub id, fetched with huggingface_hub into its cache."""

from __future__ import annotations

import re
from pathlib import Path

from shared.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]


def is_id(model: str) -> bool:
    """Whether ``model`` has the shape of a hub id, owner/name, and is not evidently meant as a file."""
    return _ID.fullmatch(model) is not None and not model.endswith(".gguf")


def download(model: str, revision: str | None, download_dir: str, *, progress: bool) -> Path:
    """The local snapshot of ``model``, from the cache alone where the network or HF_HUB_OFFLINE leaves no other way.

    Raises ConfigError in one line when the model is neither there nor to be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not progress:
        disable_progress_bars()
    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=download_dir or None, allow_patterns=_PATTERNS, etag_timeout=10
        )
    except Exception as error:  # its errors come from several libraries; the operator needs the reason, not the stack
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot fetch model {model!r} from the Hugging Face hub: {reason[:300]}") from error
    return Path(found)
