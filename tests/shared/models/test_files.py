from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import ConfigError
from shared.models import locate
from tests.shared.models.build import tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


def hf_folder(path: Path, shards: int = 1) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (path / "tokenizer.json").write_text("{}")
    names = {}
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({f"weight{shard}": torch.full((4, 4), float(shard))}, path / name)
        names[f"weight{shard}"] = name
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def test_a_folder(tmp_path: Path) -> None:
    path = hf_folder(tmp_path / "m")
    files = locate(str(path))
    assert (files.name, files.folder, files.weights, files.gguf) == (
        str(path),
        path,
        [path / "model.safetensors"],
        None,
    )


def test_a_sharded_folder(tmp_path: Path) -> None:
    path = hf_folder(tmp_path / "m", shards=3)
    assert [shard.name for shard in locate(str(path)).weights] == [
        f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)
    ]


def test_the_digest_tells_models_apart_and_copies_not(tmp_path: Path) -> None:
    path = hf_folder(tmp_path / "m")
    copy = shutil.copytree(path, tmp_path / "copy")
    assert locate(str(path)).digest == locate(str(copy)).digest
    save_file({"weight0": torch.zeros(4, 5)}, copy / "model.safetensors")
    assert locate(str(path)).digest != locate(str(copy)).digest


def missing(name: str) -> Any:
    return lambda path: (path / name).unlink()


def replaced(name: str, content: str) -> Any:
    return lambda path: (path / name).write_text(content)


def cut(path: Path) -> None:
    shard = path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing("config.json"), r"has no config\.json"),
        (missing("tokenizer.json"), "has no tokenizer"),
        (missing("model-00002-of-00002.safetensors"), r"lacks model-00002-of-00002\.safetensors"),
        (missing("model.safetensors.index.json"), r"has no weights .*it has model-00001-of-00002\.safetensors"),
        (
            cut,
            r"model-00002-of-00002\.safetensors is truncated or corrupt: its tensors end at byte \d+, the file at \d+",
        ),
        (replaced("model-00001-of-00002.safetensors", "junk"), "truncated or not safetensors"),
        (replaced("model-00001-of-00002.safetensors", "\x02\0\0\0\0\0\0\0[]"), "is not a safetensors file"),
        (replaced("config.json", "{"), "is not valid JSON"),
        (replaced("config.json", "[]"), "is not a JSON object"),
        (replaced("model.safetensors.index.json", "{}"), "has no weight_map"),
        (
            replaced("config.json", '{"architectures": ["MambaForCausalLM"]}'),
            "architecture MambaForCausalLM is not supported; supported are LlamaForCausalLM, MistralForCausalLM, "
            "Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        (
            replaced(
                "config.json", '{"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}}'
            ),
            "quantised by 'awq'",
        ),
    ],
)
def test_a_folder_that_cannot_be_served_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    path = hf_folder(tmp_path / "m", shards=2)
    damage(path)
    with pytest.raises(ConfigError, match=message) as caught:
        locate(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    """vLLM 23321, 30691: a file's path was taken for a hub id, and its tokenizer was not read."""
    path = tiny(tmp_path / "m.gguf")
    first = locate(str(path))
    assert (first.name, first.weights, first.gguf) == (str(path), [path], path)
    assert {p.name for p in first.folder.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    made = (first.folder / "tokenizer.json").stat().st_mtime_ns
    assert locate(str(path)) == first
    assert (first.folder / "tokenizer.json").stat().st_mtime_ns == made


def test_a_changed_gguf_file_is_converted_anew(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    first = locate(str(path))
    tiny(path, context_length=512)
    second = locate(str(path))
    assert second.folder != first.folder and second.digest != first.digest
    assert json.loads((second.folder / "config.json").read_text())["max_position_embeddings"] == 512


def test_download_dir_replaces_the_cache(tmp_path: Path) -> None:
    files = locate(str(tiny(tmp_path / "m.gguf")), download_dir=str(tmp_path / "elsewhere"))
    assert files.folder.is_relative_to(tmp_path / "elsewhere")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "nothing.gguf", "a/b/c", "org/model.gguf"])
def test_a_path_that_is_not_there(model: str) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        locate(model)


def test_a_truncated_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="truncated"):
        locate(str(path))
    assert [p for p in (tmp_path / "cache").rglob("*") if p.suffix != ".lock" and p.is_file()] == []


def test_metadata_of_the_wrong_type_is_one_line(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", **{"rope.freq_base": "many"})
    with pytest.raises(ConfigError, match=r"m\.gguf: its metadata does not describe a model"):
        locate(str(path))


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"cannot make the model cache .*QUIRE_CACHE"):
        locate(str(tiny(tmp_path / "m.gguf")))


def test_many_processes_convert_one_file_once(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    code = f"from shared.models import locate; print(locate({str(path)!r}).folder)"
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ.copy())
        for _ in range(4)
    ]
    answers = {child.communicate(timeout=60)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 4
    assert answers == {str(locate(str(path)).folder)}
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_no_torch_or_transformers(tmp_path: Path) -> None:
    code = f"""
        import sys
        from shared.models import locate
        locate({str(tiny(tmp_path / "m.gguf"))!r})
        print([name for name in ("torch", "transformers") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_old_half_converted_folder_is_replaced(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    files = locate(str(path))
    (files.folder / "source.json").unlink()
    (files.folder / "tokenizer.json").write_text("half")
    again = locate(str(path))
    assert again == files
    assert json.loads((again.folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"


def test_a_header_that_claims_more_than_the_file(tmp_path: Path) -> None:
    path = hf_folder(tmp_path / "m")
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 50) + b"{}")
    with pytest.raises(ConfigError, match="its header needs"):
        locate(str(path))
