"""Errors that cross module or process boundaries."""

from __future__ import annotations


class QuireError(Exception):
    """Base of every error Quire raises on purpose."""


class ConfigError(QuireError):
    """What the operator gave cannot work: a flag, a model, the memory. One line on stderr, exit code 2."""


class WireError(QuireError):
    """Frames that are not a message of this protocol. Counted and answered, never fatal."""


class RequestError(QuireError):
    """A request that gets an error answer: an HTTP status and the parts of an OpenAI error body.

    ``param`` is the field at fault (dotted path), ``code`` a stable machine-readable word (of a 400 ``invalid_value``
    where there is no better one), ``retry_after`` seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code or ("invalid_value" if status == 400 else None)
        self.param = param
        self.retry_after = retry_after
