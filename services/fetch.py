"""``quire fetch [MODEL]``: gets a model onto this machine, ready for a fast first start, without serving it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared import options
from shared.config import option, parse
from shared.log import configure
from shared.models import ModelFiles, locate


@dataclass(frozen=True)
class FetchConfig:
    model: str = options.model()
    revision: str = option("", "branch, tag or commit of a hub id; default: its main branch")
    download_dir: str = option("", "where models are kept; default: the user's cache")
    dtype: str = option(
        "auto", "convert a GGUF model's weights to this now", choices=("auto", "float32", "bfloat16", "float16")
    )
    log_level: str = options.log_level()


def main(argv: Sequence[str]) -> int:
    """Fetches, checks and converts; prints where the files are. Raises ConfigError for a model that cannot be had."""
    config = parse(FetchConfig, argv, prog="quire fetch", about="Download and convert a model without serving it.")
    configure("fetch", config.log_level)
    files = locate(config.model, download_dir=config.download_dir, revision=config.revision or None, progress=True)
    if files.gguf is not None:
        _convert(files, config.dtype)
    print(f"{files.name} ({files.digest[:16]})")
    print(f"  folder   {files.folder}")
    for path in files.weights:
        print(f"  weights  {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def _convert(files: ModelFiles, dtype: str) -> None:
    """Converts the weights to the dtype that a worker on this machine would ask for."""
    from services.worker.machine import pick_device, pick_dtype
    from services.worker.weights import load_weights

    for _ in load_weights(files, pick_dtype(dtype, pick_device("auto")), progress=True):
        pass
