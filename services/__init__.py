"""Quire's processes, and its use from Python: ``from services import LLM, SamplingParams``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.offline.llm import LLM
    from services.offline.outputs import Completion, RequestOutput
    from services.offline.params import SamplingParams

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams"]
_HOME = {"LLM": "llm", "Completion": "outputs", "RequestOutput": "outputs", "SamplingParams": "params"}


def __getattr__(name: str) -> Any:
    """Every process imports this package, so what only some programs need is loaded when it is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'services' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"services.offline.{_HOME[name]}"), name)
