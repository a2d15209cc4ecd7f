"""The header of a GGUF file: metadata and where each tensor's packed blocks lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). Everything is
bounds-checked against the file, because a download that broke off is the commonest GGUF problem; arrays of scalars are
read in one piece, so a header with 150,000 tokens takes a fraction of a second.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from shared.errors import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4
_MAX_DIMS = 4


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ``shape`` is outermost first (rows, columns), as torch has it; offsets and sizes are bytes."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header. ``digest`` is a hash of the header's bytes and the file's size."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    digest: str

    @staticmethod
    def read(path: Path) -> GGUFFile:
        """Parses and checks ``path``. Raises ConfigError naming the file and what is wrong with it."""
        try:
            with open(path, "rb") as handle:
                handle.seek(0, 2)
                size = handle.tell()
                if size < 24:
                    raise ConfigError(f"{path} is not a GGUF file: it has only {size} bytes")
                with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return _Reader(path, data, size).file()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error

    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """The packed bytes of a tensor, mapped from the file: uint8 [rows, bytes per row] ([bytes] for a vector)."""
        tensor = self.tensors[name]
        data = np.memmap(self.path, mode="r", dtype=np.uint8, offset=tensor.offset, shape=(tensor.nbytes,))
        # As a plain array: every slice of a memmap object costs microseconds more.
        return data.view(np.ndarray).reshape(*tensor.shape[:-1], -1)


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._at = 0

    def file(self) -> GGUFFile:
        if self._data[:4] != b"GGUF":
            raise ConfigError(f"{self._path} is not a GGUF file: it starts with {self._data[:4]!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ConfigError(f"{self._path}: GGUF version {version} is not supported (2 and 3 are, little endian)")
        tensor_count, metadata_count = self._scalar("Q"), self._scalar("Q")
        # The smallest entries take 13 and 24 bytes: a count beyond that is damage, found before any allocation.
        if metadata_count * 13 + tensor_count * 24 > self._size:
            raise self._corrupt(f"it claims {metadata_count} metadata entries and {tensor_count} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._text()
            metadata[key] = self._value(self._scalar("I"), 0)
        found = [self._tensor() for _ in range(tensor_count)]
        header_end = self._at
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-header_end // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in found:
            if info.name in tensors:
                raise self._corrupt(f"tensor {info.name!r} appears twice")
            tensors[info.name] = TensorInfo(info.name, info.kind, info.shape, start + info.offset, info.nbytes)
        needed = max((t.offset + t.nbytes for t in tensors.values()), default=start)
        if needed > self._size:
            raise ConfigError(f"{self._path} is truncated: its tensors need {needed} bytes, the file has {self._size}")
        digest = hashlib.sha256(self._data[:header_end] + struct.pack("<Q", self._size)).hexdigest()
        return GGUFFile(self._path, metadata, tensors, digest)

    def _corrupt(self, why: str) -> ConfigError:
        return ConfigError(f"{self._path} is corrupt at byte {self._at}: {why}")

    def _take(self, count: int) -> int:
        """Moves past ``count`` bytes and returns where they start."""
        start = self._at
        if count > self._size - start:
            raise ConfigError(
                f"{self._path} is truncated or corrupt: its header needs {start + count} bytes, "
                f"the file has {self._size}"
            )
        self._at = start + count
        return start

    def _scalar(self, code: str) -> Any:
        fmt = "<" + code
        return struct.unpack_from(fmt, self._data, self._take(struct.calcsize(fmt)))[0]

    def _text(self) -> str:
        length = self._scalar("Q")
        start = self._take(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self._corrupt("a string is not UTF-8") from None

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise self._corrupt(f"metadata of unknown type {kind}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[item])
            start = self._take(count * width)
            return list(struct.unpack_from(f"<{count}{_SCALARS[item]}", self._data, start))
        if count * 8 > self._size:
            raise self._corrupt(f"an array claims {count} entries")
        return [self._value(item, depth + 1) for _ in range(count)]

    def _tensor(self) -> TensorInfo:
        name = self._text()
        dims = self._scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        if 0 in shape:
            raise self._corrupt(f"tensor {name!r} is empty: its shape is {shape}")
        raw = self._scalar("I")
        try:
            kind = GGMLQuantizationType(raw)
        except ValueError:
            raise self._corrupt(f"tensor {name!r} has unknown type {raw}") from None
        offset = self._scalar("Q")
        block, width = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._corrupt(
                f"tensor {name!r} has rows of {shape[-1]} values, not a multiple of {kind.name}'s {block}"
            )
        count = 1
        for extent in shape:
            count *= extent
        return TensorInfo(name, kind, shape, offset, count // block * width)
