"""Logprobs on their way from results to tokenizers: whole, in order and the same, whatever happens to a request."""

from __future__ import annotations

from typing import Any

import pytest

from shared.sampling import LogitRules
