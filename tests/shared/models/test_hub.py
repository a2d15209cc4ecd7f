from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.models.hub import is_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def locate(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Locates Acme/Tiny in a process of its own: huggingface_hub reads its settings when it is imported."""
    code = (
        "from shared.errors import ConfigError; from shared.models import locate\n"
        "try:\n    print(locate('Acme/Tiny'))\nexcept ConfigError as error:\n    print('ConfigError:', error)"
    )
    settings = {"HF_HOME": str(tmp_path / "hf"), "QUIRE_CACHE": str(tmp_path / "quire"), "NO_PROXY": "*", **env}
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )


def test_ids_and_paths_are_told_apart() -> None:
    assert is_id("Qwen/Qwen3-4B") and is_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    for path in ("model", "./a/b", "/a/b", "../b", "a/b/c", "a/b.gguf", "~/b", ""):
        assert not is_id(path), path


def test_offline_and_not_cached_is_one_line(tmp_path: Path) -> None:
    done = locate(tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "ConfigError: model 'Acme/Tiny' is neither a local folder or file nor to be had from the "
    )
    assert "HF_HUB_OFFLINE" in done.stdout and done.stdout.count("\n") == 1


@pytest.mark.parametrize("answers", [False, True])
def test_a_hub_that_refuses_or_stays_silent_is_one_line_in_bounded_time(tmp_path: Path, answers: bool) -> None:
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        if answers:
            hub.listen()  # connects, and then never says a word
        done = locate(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{hub.getsockname()[1]}", HF_HUB_ETAG_TIMEOUT="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ConfigError: model 'Acme/Tiny' is neither a local") and done.stdout.count("\n") == 1


def test_a_cached_model_is_found_offline(tmp_path: Path) -> None:
    repo = tmp_path / "hf" / "hub" / "models--Acme--Tiny"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (snapshot / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, snapshot / "model.safetensors")
    done = locate(tmp_path, HF_HUB_OFFLINE="1")
    assert done.stdout.startswith("ModelFiles(name='Acme/Tiny'"), done.stdout + done.stderr
    assert str(snapshot / "model.safetensors") in done.stdout
    (snapshot / "model.safetensors").unlink()
    assert "has no weights" in locate(tmp_path, HF_HUB_OFFLINE="1").stdout
