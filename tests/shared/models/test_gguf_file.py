from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.models.gguf_file import GGUFFile
from tests.shared.models.build import Writer, tiny


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_metadata_and_tensors_are_those_the_gguf_package_reads(tmp_path: Path) -> None:
    made = Writer(tmp_path / "m.gguf")
    made.writer.add_array("some.floats", [0.5, -1.5])
    made.writer.add_array("some.words", ["ünï", "", "한국"])
    made.writer.add_bool("some.flag", True)
    made.writer.add_int64("some.long", -(1 << 40))
    made.writer.add_float64("some.double", 1 / 3)
    rng = np.random.default_rng(0)
    made.tensor("a", rng.standard_normal((3, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_1)
    made.tensor("b", rng.standard_normal(5).astype(np.float32))
    path = made.close()

    ours, theirs = GGUFFile.read(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors] == ["a", "b"]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.kind, info.offset, info.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert ours.blocks(tensor.name).tobytes() == tensor.data.tobytes()
    assert ours.blocks("a").shape == (3, 2 * 20)


def test_the_digest_follows_the_header(tmp_path: Path) -> None:
    one = tiny(tmp_path / "one.gguf")
    same = tiny(tmp_path / "same.gguf")
    other = tiny(tmp_path / "other.gguf", context_length=512)
    assert GGUFFile.read(one).digest == GGUFFile.read(same).digest != GGUFFile.read(other).digest


def test_every_cut_is_found(sample: Path, tmp_path: Path) -> None:
    whole = sample.read_bytes()
    short = tmp_path / "short.gguf"
    for length in [0, 3, 10, 23, 24, 100, 1000, 5000, len(whole) // 2, len(whole) - 40, len(whole) - 1]:
        short.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"short\.gguf"):
            GGUFFile.read(short)


def test_truncated_tensor_data_tells_both_sizes(sample: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    whole = sample.read_bytes()
    short.write_bytes(whole[:-1000])
    with pytest.raises(ConfigError, match=rf"need {len(whole)} bytes, the file has {len(whole) - 1000}"):
        GGUFFile.read(short)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_a_config_error_or_harmless(sample: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(sample.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, 1200))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        GGUFFile.read(path)
    except ConfigError as error:
        assert "damaged.gguf" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(40), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62) + bytes(40), "truncated or corrupt"),
    ],
)
def test_what_is_no_gguf_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        GGUFFile.read(path)


def test_an_unreadable_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.gguf"):
        GGUFFile.read(tmp_path / "nothing.gguf")
