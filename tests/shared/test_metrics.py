from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import Registry, render


def page(*registries: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = render([r.snapshot() for r in registries], {"model_name": "m"}).decode()
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_processes_are_summed() -> None:
    one, two = Registry(), Registry()
    for registry, amount in ((one, 2), (two, 3)):
        registry.counter("vllm:prompt_tokens", "p").inc(amount)
        registry.gauge("vllm:num_requests_running", "r").set(amount)
        registry.counter("vllm:request_success", "s", ["finished_reason"]).inc(1, ("stop",))
        registry.histogram("vllm:time_to_first_token_seconds", "t", [0.1, 1.0]).observe(0.1 * amount)
    got = page(one, two)
    assert got["vllm:prompt_tokens_total", ()] == 5
    assert got["vllm:num_requests_running", ()] == 5
    assert got["vllm:request_success_total", (("finished_reason", "stop"),)] == 2
    assert got["vllm:time_to_first_token_seconds_bucket", (("le", "0.1"),)] == 0
    assert got["vllm:time_to_first_token_seconds_bucket", (("le", "1.0"),)] == 2
    assert got["vllm:time_to_first_token_seconds_bucket", (("le", "+Inf"),)] == 2
    assert got["vllm:time_to_first_token_seconds_sum", ()] == pytest.approx(0.5)


def test_a_bound_belongs_to_its_bucket() -> None:
    registry = Registry()
    histogram = registry.histogram("h", "h", [1, 2])
    for value in (0.5, 1, 1.5, 2, 9):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]


def test_a_name_is_taken_once() -> None:
    registry = Registry()
    registry.counter("a", "")
    with pytest.raises(ValueError, match="metric a exists already"):
        registry.gauge("a", "")
