"""What a gateway measures: latencies as a client sees them, and HTTP answers by status."""

from __future__ import annotations

from typing import Any

from shared.metrics import Registry

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)


class GatewayMetrics:
    """Times are seconds, from the request's arrival at this gateway to the arrival of its text here."""

    def __init__(self) -> None:
        self.registry = registry = Registry()
        self.first_token = registry.histogram(
            "vllm:time_to_first_token_seconds", "Time to first token in seconds.", TTFT_BUCKETS
        )
        self.inter_token = registry.histogram(
            "vllm:inter_token_latency_seconds", "Inter-token latency in seconds.", TOKEN_BUCKETS
        )
        self.per_output_token = registry.histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token of a request.", TOKEN_BUCKETS
        )
        self.end_to_end = registry.histogram(
            "vllm:e2e_request_latency_seconds", "End-to-end request latency in seconds.", REQUEST_BUCKETS
        )
        self.requests = registry.counter("quire:requests", "Requests given to a process.", ("process",))
        self.responses = registry.counter("quire:http_responses", "HTTP answers by status.", ("status",))
        self.open_requests = registry.gauge("quire:gateway_requests_open", "Requests that gateways have under way.")
        self.cancelled = registry.counter("quire:gateway_requests_cancelled", "Requests whose client went away.")
        self.resubmitted = registry.counter(
            "quire:gateway_requests_resubmitted", "Requests given to a second tokenizer."
        )
        self.gaps = registry.counter("quire:gateway_text_gaps", "Pieces of text found missing and asked for again.")
        self.malformed = registry.gauge("quire:gateway_messages_malformed", "Messages that did not decode.")
        self._reported: dict[str, Any] = {}

    def changes(self) -> dict[str, Any]:
        """The snapshot for a heartbeat: empty when nothing changed since the last one."""
        page = self.registry.snapshot()
        if page == self._reported:
            return {}
        self._reported = page
        return page
