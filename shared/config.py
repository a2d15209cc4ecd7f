"""Command-line options as frozen dataclasses.

A process's options are the fields of one dataclass, made with ``option``; ``parse`` fills it from the command line and
``QUIRE_*`` environment variables, and ``to_argv`` writes the command line that gives an equal one (how the launcher
starts children). A field ``max_num_seqs`` is ``--max-num-seqs`` and ``QUIRE_MAX_NUM_SEQS``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn, TypeVar

from shared.errors import ConfigError

C = TypeVar("C")
ENVIRONMENT = "Each option is also an environment variable: --max-num-seqs is QUIRE_MAX_NUM_SEQS."
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def option(
    default: Any,
    help: str,
    *,
    positional: bool = False,
    choices: Sequence[str] | None = None,
    secret: bool = False,
    size: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    flags: Sequence[str] = (),
) -> Any:
    """A dataclass field that is a command-line option.

    secret: travels to children in the environment and is never printed. size: bytes, with a suffix such as 4GiB.
    flags: further spellings. minimum and maximum are checked and named in the error.
    """
    metadata = {
        "help": help,
        "positional": positional,
        "choices": choices,
        "secret": secret,
        "size": size,
        "minimum": minimum,
        "maximum": maximum,
        "flags": tuple(flags),
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_size(text: str) -> int:
    """Bytes in ``text``: digits with an optional decimal (k, M, G) or binary (KiB, MiB, GiB) suffix.

    Raises argparse.ArgumentTypeError, whose words argparse shows as they are.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4GiB")
    return int(Fraction(match[1]) * _UNITS[match[2]])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(cls: type[C], argv: Sequence[str], env: Mapping[str, str] | None = None, *, prog: str, about: str) -> C:
    """One config from the command line. Raises ConfigError naming the option, its value and the limit."""
    return typing.cast(C, parse_many([cls], argv, env, prog=prog, about=about)[0])


def parse_many(
    classes: Sequence[type[Any]],
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    prog: str,
    about: str,
    hidden: Collection[str] = (),
) -> list[Any]:
    """Several configs from one command line that takes the options of all (equal names mean one option).

    hidden: fields that this command sets itself and that are no options of it.
    """
    env = os.environ if env is None else env
    parser = _Parser(prog=prog, description=about, epilog=ENVIRONMENT, allow_abbrev=False)
    seen: dict[str, Any] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            if f.name not in seen and f.name not in hidden:
                seen[f.name] = _add(parser, f, hints[f.name])
    given = vars(parser.parse_args(list(argv)))
    values = {name: _from_env(name, kind, env) for name, kind in seen.items()}
    values.update({name: value for name, value in given.items() if value is not None})
    configs = []
    for cls in classes:
        chosen = {f.name: values[f.name] for f in dataclasses.fields(cls) if values.get(f.name) is not None}
        for f in dataclasses.fields(cls):
            _check(f, chosen.get(f.name))
        configs.append(cls(**chosen))
    return configs


def to_argv(config: Any) -> list[str]:
    """The options of ``config`` that differ from their defaults, secrets left out (see ``secret_env``)."""
    argv: list[str] = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.metadata["secret"] or value == _default(f):
            continue
        if f.metadata["positional"]:
            argv.insert(0, str(value))
        elif isinstance(value, bool):
            argv.append(("--" if value else "--no-") + f.name.replace("_", "-"))
        elif isinstance(value, list):
            argv.extend(f"{_flag(f.name)}={item}" for item in value)
        else:
            argv.append(f"{_flag(f.name)}={value}")
    return argv


def secret_env(config: Any) -> dict[str, str]:
    """Environment variables that carry the secret options of ``config`` to a child."""
    return {
        _variable(f.name): ",".join(value) if isinstance(value, list) else str(value)
        for f in dataclasses.fields(config)
        if f.metadata["secret"] and (value := getattr(config, f.name)) != _default(f)
    }


def describe(config: Any) -> str:
    """The whole config on one line, secrets masked: what a process prints once at its start."""
    parts = (
        f"{f.name}={'***' if f.metadata['secret'] and getattr(config, f.name) else repr(getattr(config, f.name))}"
        for f in dataclasses.fields(config)
    )
    return " ".join(parts)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "QUIRE_" + name.upper()


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _bare(hint: Any) -> tuple[Any, bool]:
    """The type inside ``X | None`` or ``list[X]``, and whether it is a list."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


def _add(parser: argparse.ArgumentParser, f: dataclasses.Field[Any], hint: Any) -> Any:
    """Adds the option of ``f`` and returns (converter, is list) to read it from the environment."""
    kind, many = _bare(hint)
    default = _default(f)
    shown = "" if default in (None, "", []) or f.metadata["secret"] else f" (default: {default})"
    meta = f.metadata["help"].replace("%", "%%") + shown
    convert: Any = parse_size if f.metadata["size"] else kind
    if f.metadata["positional"]:
        parser.add_argument(f.name, nargs="?", metavar=f.name.upper(), help=meta)
    elif kind is bool:
        parser.add_argument(_flag(f.name), action=argparse.BooleanOptionalAction, default=None, help=meta)
    else:
        extra: dict[str, Any] = {"action": "extend", "nargs": "+"} if many else {}
        flags = [_flag(f.name), *f.metadata["flags"]]
        name = kind.__name__.upper() if not f.metadata["size"] else "BYTES"
        if f.metadata["choices"]:
            extra["choices"] = f.metadata["choices"]
        else:
            extra["metavar"] = name
        parser.add_argument(*flags, dest=f.name, type=convert, default=None, help=meta, **extra)
    return convert, many


def _from_env(name: str, kind: tuple[Any, bool], env: Mapping[str, str]) -> Any:
    text = env.get(_variable(name))
    if text is None:
        return None
    convert, many = kind
    try:
        if convert is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return [convert(item) for item in text.split(",") if item] if many else convert(text)
    except (KeyError, ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"environment variable {_variable(name)}: invalid value {text!r}") from error


def _check(f: dataclasses.Field[Any], value: Any) -> None:
    if value is None:
        return
    low, high, choices = f.metadata["minimum"], f.metadata["maximum"], f.metadata["choices"]
    if isinstance(value, float) and not math.isfinite(value):  # nan is neither below a minimum nor above a maximum
        raise ConfigError(f"{_flag(f.name)} is {value}, not a finite number")
    if low is not None and value < low:
        raise ConfigError(f"{_flag(f.name)} is {value}, below its minimum of {low}")
    if high is not None and value > high:
        raise ConfigError(f"{_flag(f.name)} is {value}, above its maximum of {high}")
    if choices is not None and value not in choices:
        raise ConfigError(f"{_flag(f.name)} is {value!r}, not one of {', '.join(choices)}")
