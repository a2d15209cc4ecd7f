"""Turns message dataclasses into frames and back, checking every value on the way in.

A message is ``[kind, version]`` (two bytes), one msgpack array of its fields in order, then one raw little-endian
int32 frame for each field annotated ``Int32``. The converters are derived once per class from its annotations; what
does not fit them is a WireError that names class and field. Nothing is ever unpickled.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from shared.errors import WireError

Int32 = npt.NDArray[np.int32]
Converter = Callable[[Any], Any]
M = TypeVar("M")

_LITTLE_INT32 = np.dtype("<i4")


def int32(values: Sequence[int] | Int32) -> Int32:
    return np.asarray(values, dtype=np.int32)


def no_ids() -> Int32:
    return np.empty(0, dtype=np.int32)


def pack(value: Any) -> bytes:
    return typing.cast(bytes, msgpack.packb(value, use_bin_type=True))


def unpack(raw: bytes | memoryview) -> Any:
    try:
        return msgpack.unpackb(raw, raw=False, strict_map_key=False)
    except Exception as error:  # msgpack raises several unrelated types for malformed bytes
        raise WireError(f"not msgpack: {type(error).__name__}") from error


class Layout(Generic[M]):
    """The wire form of one dataclass: how its fields become an array and frames, and how they come back."""

    def __init__(self, cls: type[M]) -> None:
        self.cls = cls
        hints = typing.get_type_hints(cls)
        self._plain = [(f.name, _converter(hints[f.name])) for f in fields(cls) if hints[f.name] != Int32]  # type: ignore[arg-type]
        self._raw = [f.name for f in fields(cls) if hints[f.name] == Int32]  # type: ignore[arg-type]
        self._flat = [(name, _flattener(hints[name])) for name, _ in self._plain]

    def encode(self, message: M) -> list[bytes]:
        body = [flatten(getattr(message, name)) for name, flatten in self._flat]
        raw = [np.ascontiguousarray(getattr(message, name), dtype=_LITTLE_INT32).tobytes() for name in self._raw]
        return [pack(body), *raw]

    def decode(self, frames: Sequence[bytes | memoryview]) -> M:
        if len(frames) != 1 + len(self._raw):
            raise WireError(f"{self.cls.__name__} has {1 + len(self._raw)} frames after its kind, got {len(frames)}")
        body = unpack(frames[0])
        if not isinstance(body, list) or len(body) != len(self._plain):
            raise WireError(f"{self.cls.__name__} is an array of {len(self._plain)} fields")
        values: dict[str, Any] = {}
        for (name, convert), value in zip(self._plain, body, strict=True):
            try:
                values[name] = convert(value)
            except (TypeError, ValueError) as error:
                raise WireError(f"{self.cls.__name__}.{name}: {error}") from error
        for name, frame in zip(self._raw, frames[1:], strict=True):
            if len(frame) % 4:
                raise WireError(f"{self.cls.__name__}.{name}: {len(frame)} bytes are not int32s")
            values[name] = np.frombuffer(frame, dtype=_LITTLE_INT32)
        return self.cls(**values)


def _reject(value: Any, wanted: str) -> typing.NoReturn:
    raise TypeError(f"wanted {wanted}, got {type(value).__name__}")


def _exactly(kind: type, wanted: str) -> Converter:
    def convert(value: Any) -> Any:
        if type(value) is not kind:
            _reject(value, wanted)
        return value

    return convert


def _to_float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        _reject(value, "float")
    return float(value)


def _to_list(item: Converter, plain: type | None) -> Converter:
    def convert(value: Any) -> list[Any]:
        if type(value) is not list:
            _reject(value, "array")
        if plain is not None:  # the common columns of ints and strings, without a call per element
            for element in value:
                if type(element) is not plain:
                    _reject(element, plain.__name__)
            return value
        return [item(element) for element in value]

    return convert


def _to_dict(item: Converter) -> Converter:
    def convert(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            _reject(value, "map")
        for key in value:
            if type(key) is not str:
                _reject(key, "string key")
        return {key: item(element) for key, element in value.items()}

    return convert


def _to_optional(inner: Converter) -> Converter:
    return lambda value: None if value is None else inner(value)


def _to_dataclass(cls: type) -> Converter:
    hints = typing.get_type_hints(cls)
    converters = [_converter(hints[f.name]) for f in fields(cls)]

    def convert(value: Any) -> Any:
        if type(value) is not list or len(value) != len(converters):
            raise TypeError(f"{cls.__name__} is an array of {len(converters)} fields")
        return cls(*(one(element) for one, element in zip(converters, value, strict=True)))

    return convert


def _converter(hint: Any) -> Converter:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint is float:
        return _to_float
    if hint in (int, str, bytes, bool):
        return _exactly(hint, hint.__name__)
    if origin is list:
        return _to_list(_converter(args[0]), args[0] if args[0] in (int, str, bytes, bool) else None)
    if origin is dict:
        return _to_dict(_converter(args[1]))
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and type(None) in args:
        return _to_optional(_converter(next(a for a in args if a is not type(None))))
    if is_dataclass(hint) and isinstance(hint, type):
        return _to_dataclass(hint)
    raise TypeError(f"no wire form for {hint!r}")


def _flattener(hint: Any) -> Converter:
    """Nested dataclasses travel as positional arrays; everything else is msgpack's own."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        parts = [(f.name, _flattener(hints[f.name])) for f in fields(hint)]
        return lambda value: [flatten(getattr(value, name)) for name, flatten in parts]
    if origin is list and is_dataclass(args[0]):
        inner = _flattener(args[0])
        return lambda value: [inner(element) for element in value]
    if origin in (typing.Union, types.UnionType):
        return _to_optional(_flattener(next(a for a in args if a is not type(None))))
    return lambda value: value
