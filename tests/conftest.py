"""Settings every test process needs before torch is imported."""

from __future__ import annotations

import os

# OpenMP threads that spin at barriers make torch many times slower when the cores are shared, as test machines' are.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
