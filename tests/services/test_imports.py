"""Who may import what: the rules that keep the processes small and apart."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "tokenizer", "scheduler", "worker", "launcher")
FORBIDDEN = {
    "gateway": {"torch", "transformers", "tokenizers", "kernels"},
    "tokenizer": {"torch", "kernels", "starlette", "uvicorn"},
    "scheduler": {"torch", "transformers", "tokenizers", "kernels", "starlette", "uvicorn"},
    "launcher": {"torch", "transformers", "kernels"},  # it converts model files, so it may know the tokenizers library
    "worker": {"starlette", "uvicorn"},
}
NO_ASYNCIO = ("scheduler", "worker")  # their hot loops use a plain poller


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_loading_a_service_loads_nothing_forbidden(service: str) -> None:
    script = f"import services.{service}.main, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in loaded.stdout.split()} & FORBIDDEN[service]


@pytest.mark.parametrize("service", SERVICES)
def test_services_do_not_import_each_other(service: str) -> None:
    others = [f"services.{other}" for other in (*SERVICES, "offline") if other != service]
    for path in (ROOT / "services" / service).rglob("*.py"):
        for module in imports_of(path):
            foreign = [other for other in others if module == other or module.startswith(f"{other}.")]
            # The launcher starts the others, so it alone knows their options.
            if foreign and not (service == "launcher" and ".config" in module):
                raise AssertionError(f"{path.relative_to(ROOT)} imports {module}")
            if service in NO_ASYNCIO:
                assert module.split(".")[0] != "asyncio", path


@pytest.mark.parametrize("program", ["batch", "chat", "complete", "llm"])
def test_programs_that_use_a_server_load_nothing_of_it(program: str) -> None:
    script = f"import services.offline.{program}, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    forbidden = FORBIDDEN["launcher"] | {"starlette", "uvicorn"}
    assert not {name.split(".")[0] for name in loaded.stdout.split()} & forbidden


@pytest.mark.parametrize("package", ["shared", "kernels"])
def test_lower_layers_know_no_service(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not any(module.split(".")[0] == "services" for module in imports_of(path)), path


def test_nothing_unpickles() -> None:
    for package in ("services", "shared", "kernels"):
        for path in (ROOT / package).rglob("*.py"):
            assert not imports_of(path) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
