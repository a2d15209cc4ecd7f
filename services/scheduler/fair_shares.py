"""Weighted fair shares of tenants, as virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a tenant's counter grows by the service it gets,
divided by its weight, and whoever has the smallest counter is served next. A tenant that comes back is lifted to the
smallest counter among those that wait, so that nobody saves up service by staying away. Two tenants that both always
wait get the same service per weight, up to 2 * max(INPUT * longest prompt, OUTPUT * tokens of a full batch).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

INPUT = 1.0  # service of a prompt token, counted at admission
OUTPUT = 2.0  # service of an output token, counted when it is delivered


class FairShares:
    """``weights``: of tenants by name, each above 0; everybody else's is 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._counters: dict[str, float] = {}
        self._last = ""  # the tenant who waited last, when nobody waits

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def arrive(self, tenant: str, waiting: Collection[str]) -> None:
        """``tenant`` had nothing waiting and now has; ``waiting`` are those who wait already."""
        self._counters[tenant] = max(self.counter(tenant), self._base(waiting))

    def leave(self, tenant: str) -> None:
        """``tenant`` was the last who waited, and waits no more."""
        self._last = tenant

    def serve(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        service = INPUT * prompt_tokens + OUTPUT * output_tokens
        self._counters[tenant] = self.counter(tenant) + service / self._weights.get(tenant, 1.0)

    def forget(self, active: Collection[str], waiting: Collection[str]) -> None:
        """Drops the counters of tenants not ``active`` who would be lifted anyway when they come back."""
        base, keep = self._base(waiting), {*active, self._last}
        self._counters = {name: count for name, count in self._counters.items() if name in keep or count > base}

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def _base(self, waiting: Collection[str]) -> float:
        return min((self.counter(one) for one in waiting), default=self.counter(self._last))
