"""What the tests of foreign clients share: a server on the built-in model, and a folder with JavaScript packages."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.server import Server, serve

CLIENTS = Path(__file__).parent / "clients"


@pytest.fixture(scope="session")
def client_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--dtype", "float32", "--max-model-len", "2048")
    with serve(tmp_path_factory.mktemp("clients"), *options) as server:
        yield server


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs in JavaScript and what they need."""
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "chat.mjs", "features.mjs"):
        shutil.copy(CLIENTS / name, folder / name)
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"]
    subprocess.run(npm, cwd=folder, check=True, timeout=240)
    return folder
