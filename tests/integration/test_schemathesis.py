"""Requests that schemathesis makes up from ``/openapi.json``: good ones, bad ones, and ones just at the limits.

QUIRE_SCHEMATHESIS_SECONDS=120 lets it look longer than a run of all tests can wait, QUIRE_SCHEMATHESIS_SEED elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.server import NULL, serve

SECONDS = os.environ.get("QUIRE_SCHEMATHESIS_SECONDS", "20")
SEED = os.environ.get("QUIRE_SCHEMATHESIS_SEED", "1")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
# A body over --max-body-bytes is refused as that, whatever is in it.
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 404, 405, 413]
"""
# A request that asks to be complete within a moment is rightly answered 503 when it is not.
HOOKS = """
import schemathesis

@schemathesis.hook
def before_call(context, case, kwargs):
    timeout = case.body.get("timeout") if isinstance(case.body, dict) else None
    if isinstance(timeout, int | float) and 0 < timeout < 60:
        case.body["timeout"] = 60
"""


def test_no_request_breaks_the_server_or_gets_what_is_not_documented(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    (tmp_path / "hooks.py").write_text(HOOKS)
    with serve(tmp_path, *NULL, "--max-model-len", "512") as server:
        command = [
            *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--max-time", SECONDS, "--max-response-time", "10", "--seed", SEED),
            *("--request-timeout", "30", "--phases", "examples,coverage,fuzzing"),
            *("--generation-database", "none", "--warnings", "off", "--no-color", "--continue-on-failure"),
        ]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=float(SECONDS) + 120,
            check=False,
        )
        report = "\n".join(line[:300] for line in (done.stdout + done.stderr).splitlines())  # bodies can be very long
        assert done.returncode == 0, report
        server.wait_for_metric("vllm:num_requests_running", 0.0, timeout=10)
        with server.client() as client:
            assert client.get("/ready").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "still here", "max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] == 3
        assert "Traceback" not in server.log.read_text()
