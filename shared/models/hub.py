"""Models named by a Hugging Face hub id, fetched with huggingface_hub into its cache."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from shared.errors import ConfigError

log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]


def is_id(model: str) -> bool:
    """Whether ``model`` has the shape of a hub id, owner/name, and is not evidently meant as a file."""
    return _ID.fullmatch(model) is not None and not model.endswith(".gguf")


def download(model: str, revision: str | None, download_dir: str, *, progress: bool) -> Path:
    """The local snapshot of ``model``; the cached one where the hub cannot be asked (no network, HF_HUB_OFFLINE).

    Raises ConfigError in one line when the model is neither there nor to be had.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not progress:
        disable_progress_bars()
    failure = ""
    try:
        # snapshot_download asks the same without a time limit: a hub that accepts and stays silent would hang it.
        HfApi().model_info(model, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of several libraries; the operator needs the reason, not the stack
        failure = _reason(error)
    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir or None,
            allow_patterns=_PATTERNS,
            local_files_only=bool(failure),
        )
    except Exception as error:
        raise ConfigError(
            f"model {model!r} is neither a local folder or file nor to be had from the Hugging Face hub: "
            f"{failure or _reason(error)}"
        ) from error
    if failure:
        log.warning("using the cached copy of %s: %s", model, failure)
    return Path(found)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
