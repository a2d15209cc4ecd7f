"""Where a model's files are: a folder, a hub id, a GGUF file or the built-in model, all seen the same way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.models import builtin, folder, gguf_folder, hub
from shared.models.cache import cache_root


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found whole.

    ``name``: as the operator gave it. ``folder``: config.json, generation_config.json, tokenizer.json and
    tokenizer_config.json. ``weights``: safetensors shards, or the one GGUF file, which is then ``gguf`` too.
    ``digest``: hex, equal for equal configuration and weights.
    """

    name: str
    folder: Path
    weights: list[Path]
    gguf: Path | None
    digest: str


def locate(model: str, *, download_dir: str = "", revision: str | None = None, progress: bool = False) -> ModelFiles:
    """Finds ``model``, fetching and converting what is not on this machine yet.

    model: a Hugging Face folder, a .gguf file, a hub id such as Qwen/Qwen3-4B, or "" for the built-in model.
    download_dir: where fetched and converted files are kept; default: the user's cache. revision: of a hub id.
    Raises ConfigError, in one line that names the file and the fault, for whatever cannot be served.
    """
    if not model:
        root = cache_root(download_dir)
        return _gguf(builtin.NAME, builtin.fetch(root, progress=progress), root, builtin.SHA256)
    path = Path(model).expanduser()
    if path.is_file():
        return _gguf(model, path, cache_root(download_dir))
    if not path.is_dir():
        if not hub.is_id(model):
            raise ConfigError(f"model {model!r}: no such file or folder, and not a hub id such as Qwen/Qwen3-4B")
        path = hub.download(model, revision, download_dir, progress=progress)
    weights, digest = folder.check(path)
    return ModelFiles(model, path, weights, None, digest)


def _gguf(name: str, path: Path, root: Path, digest: str = "") -> ModelFiles:
    made, digest = gguf_folder.convert(path, root, digest)
    return ModelFiles(name, made, [path], path, digest)
