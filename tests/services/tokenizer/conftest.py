from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from services.tokenizer.tokenizer import Tokenizer
from shared.models import locate
from tests.services.tokenizer import toy


@pytest.fixture(scope="session")
def byte_level() -> Library:
    return toy.byte_level()


@pytest.fixture(scope="session")
def byte_fallback() -> Library:
    return toy.byte_fallback()


@pytest.fixture(scope="session")
def builtin_folder() -> Path:
    return locate("").folder


@pytest.fixture(scope="session")
def builtin_library(builtin_folder: Path) -> Library:
    return Library.from_file(str(builtin_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def builtin(builtin_folder: Path) -> Tokenizer:
    return Tokenizer.load(builtin_folder)


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory, byte_level: Library) -> Tokenizer:
    """The byte-level toy as a model's tokenizer, with a BOS token and a chat template."""
    return Tokenizer.load(toy.save(tmp_path_factory.mktemp("chatty"), byte_level, bos_token="<|im_start|>"))
