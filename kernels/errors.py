"""What ``kernels`` raises besides ValueError for wrong arguments."""

from __future__ import annotations


class UnavailableError(Exception):
    """An implementation cannot run on this machine; says why."""
