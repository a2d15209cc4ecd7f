"""The names clients may ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import RequestError


class Models:
    """The served model under all its names, the first being the one that answers show when none was asked for.

    given: the operator's names. Without any, the server's own name is the only one: ``welcomed`` tells it, or raises
    RequestError 503 before it is known.
    """

    def __init__(self, given: Sequence[str], welcomed: Callable[[], str]) -> None:
        self._given, self._welcomed = tuple(given), welcomed
        self._created = int(time.time())

    @property
    def names(self) -> tuple[str, ...]:
        return self._given or (self._welcomed(),)

    @property
    def shown(self) -> str:
        """The first name, for labels; empty before it is known."""
        try:
            return self.names[0]
        except RequestError:
            return ""

    def resolve(self, asked: Any) -> str:
        """The name to answer with. Raises RequestError: 404 for a model that is not served here."""
        if asked is None:
            return self.names[0]
        if not isinstance(asked, str):
            raise RequestError(f"model: should be a string, got {type(asked).__name__}", param="model")
        if asked not in self.names:
            raise RequestError(
                f"model: {asked[:200]!r} does not exist here; served: {', '.join(self.names)}",
                status=404,
                code="model_not_found",
                param="model",
            )
        return asked

    def card(self, name: str, max_model_len: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "root": self.names[0],
            "parent": None,
            "max_model_len": max_model_len,
        }
