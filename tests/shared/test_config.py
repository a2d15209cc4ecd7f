from __future__ import annotations

from dataclasses import dataclass

import pytest

from shared.config import describe, option, parse, parse_many, parse_size, secret_env, to_argv
from shared.errors import ConfigError


@dataclass(frozen=True)
class Engine:
    model: str = option("", "what to serve", positional=True)
    max_num_seqs: int = option(256, "at once", minimum=1, maximum=65536)
    kv_cache_memory_bytes: int | None = option(None, "memory", size=True)
    share: float = option(0.5, "of memory", minimum=0.01, maximum=0.95)
    seconds: float | None = option(None, "to wait", minimum=0)
    eager: bool = option(False, "no graphs")
    api_key: list[str] = option([], "keys", secret=True)
    device: str = option("auto", "where", choices=("auto", "cpu"))


@dataclass(frozen=True)
class Front:
    model: str = option("", "what to serve", positional=True)
    port: int = option(8000, "to listen on", minimum=0, maximum=65535)


def read(*argv: str, env: dict[str, str] | None = None) -> Engine:
    return parse(Engine, argv, env or {}, prog="quire test", about="")


def test_defaults_and_flags() -> None:
    assert read() == Engine()
    given = read("org/m", "--max-num-seqs", "8", "--kv-cache-memory-bytes=2GiB", "--eager", "--api-key", "a", "b")
    assert given == Engine("org/m", 8, 2 * 1024**3, eager=True, api_key=["a", "b"])


def test_environment_yields_to_the_command_line() -> None:
    env = {"QUIRE_MAX_NUM_SEQS": "4", "QUIRE_EAGER": "true", "QUIRE_API_KEY": "x,y"}
    assert read(env=env) == Engine(max_num_seqs=4, eager=True, api_key=["x", "y"])
    assert read("--max-num-seqs=5", "--no-eager", env=env).max_num_seqs == 5


@pytest.mark.parametrize(
    ("argv", "env", "complaint"),
    [
        (["--max-num-seqs", "0"], {}, r"--max-num-seqs is 0, below its minimum of 1"),
        (["--share", "1"], {}, r"--share is 1.0, above its maximum of 0.95"),
        (["--max-num-seqs", "many"], {}, r"--max-num-seqs.*'many'"),
        (["--kv-cache-memory-bytes", "4 apples"], {}, r"--kv-cache-memory-bytes.*'4 apples'"),
        (["--kv-cache-memory-bytes", "4GB of it"], {}, r"'4GB of it' is not a size such as 4GiB$"),
        ([], {"QUIRE_KV_CACHE_MEMORY_BYTES": "4 apples"}, r"QUIRE_KV_CACHE_MEMORY_BYTES: invalid value '4 apples'"),
        (["--share", "nan"], {}, r"--share is nan, not a finite number"),
        (["--seconds", "NaN"], {}, r"--seconds is nan, not a finite number"),
        (["--seconds", "1e999"], {}, r"--seconds is inf, not a finite number"),
        ([], {"QUIRE_SECONDS": "-inf"}, r"--seconds is -inf, not a finite number"),
        (["--device", "tpu"], {}, r"--device.*'tpu'"),
        (["--colour", "red"], {}, r"--colour"),
        ([], {"QUIRE_MAX_NUM_SEQS": "x"}, r"QUIRE_MAX_NUM_SEQS: invalid value 'x'"),
        ([], {"QUIRE_DEVICE": "tpu"}, r"--device is 'tpu', not one of auto, cpu"),
        ([], {"QUIRE_EAGER": "maybe"}, r"QUIRE_EAGER: invalid value 'maybe'"),
    ],
)
def test_errors_name_option_value_and_limit(argv: list[str], env: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(*argv, env=env)


def test_a_child_gets_an_equal_config() -> None:
    config = Engine("m", 8, 123, 0.25, 1.5, True, ["k1", "k2"], "cpu")
    argv, env = to_argv(config), secret_env(config)
    assert not any("k1" in word for word in argv)
    assert parse(Engine, argv, env, prog="", about="") == config


def test_secrets_are_not_described() -> None:
    line = describe(Engine(api_key=["hunter2"]))
    assert "hunter2" not in line
    assert "api_key=***" in line


def test_several_configs_share_one_command_line() -> None:
    engine, front = parse_many([Engine, Front], ["m", "--port", "1", "--eager"], {}, prog="", about="")
    assert (engine.model, engine.eager, front) == ("m", True, Front("m", 1))


def test_hidden_fields_are_no_options() -> None:
    with pytest.raises(ConfigError, match="--port"):
        parse_many([Front], ["--port", "1"], {}, prog="", about="", hidden={"port"})
    assert parse_many([Front], [], {"QUIRE_PORT": "1"}, prog="", about="", hidden={"port"}) == [Front()]


@pytest.mark.parametrize(
    ("text", "size"), [("17", 17), ("1k", 1000), ("1.5KiB", 1536), ("2M", 2_000_000), ("4GiB", 4 << 30), ("1gb", 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_has_any_number_of_digits() -> None:
    assert parse_size("9" * 400) == 10**400 - 1
