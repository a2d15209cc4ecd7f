"""Clients that nobody here wrote: OpenAI's for Python and JavaScript, and a web browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import openai
import pytest

from tests.integration.prompts import PROMPTS
from tests.integration.server import Server

HERE = Path(__file__).parent / "clients"
pytestmark = pytest.mark.client

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_ARGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture
def server(client_server: Server) -> Server:
    return client_server


def test_openai_python_streams_a_chat(server: Server) -> None:
    messages: Any = PROMPTS["capital"]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        assert [model.id for model in client.models.list()] == [server.model]
        whole = client.chat.completions.create(model=server.model, messages=messages, temperature=0)
        assert whole.choices[0].message.content == "The capital of France is Paris."
        stream = client.chat.completions.create(
            model=server.model, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == "The capital of France is Paris."
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    usage, whole_usage = chunks[-1].usage, whole.usage
    assert usage is not None and whole_usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole_usage.prompt_tokens, whole_usage.completion_tokens)
    cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
    assert cached == 32  # the second time, the two full blocks of 16 of its 37 tokens


def test_openai_python_sees_errors_as_its_own_types(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.completions.create(model="no-such-model", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=server.model, prompt="x", max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"
    assert "2048" in str(caught.value)
    assert "100000" in str(caught.value)


def test_openai_async_python_cancels(server: Server) -> None:
    """Leaving a stream early closes the connection, and the request with it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        stream = client.completions.create(
            model=server.model, prompt="Count:", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    server.wait_for_metric("vllm:num_requests_running", 0.0, timeout=3)


@pytest.mark.skipif(shutil.which("npm") is None, reason="no Node.js with npm on this machine")
def test_openai_javascript_streams_a_chat(server: Server, node_modules: Path) -> None:
    node = subprocess.run(
        ["node", "chat.mjs", f"{server.url}/v1", server.model],
        cwd=node_modules,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert node.returncode == 0, node.stderr
    result = json.loads(node.stdout)
    assert result["text"] == "The capital of France is Paris."
    assert result["finish"] == ["stop"]
    assert result["chunks"] >= 8
    assert result["usage"]["completion_tokens"] == 8


class PageServer(HTTPServer):
    """Serves the page, at an origin that is not the API's, and receives its report."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), PageHandler)
        self.report: dict[str, Any] = {}
        self.reported = threading.Event()


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write((HERE / "page.html").read_bytes())

    def do_POST(self) -> None:
        self.server.report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.reported.set()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_page_from_another_origin_streams_by_fetch(server: Server, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    with PageServer() as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        query = urlencode({"api": server.url, "model": server.model})
        url = f"http://127.0.0.1:{pages.server_port}/?{query}"
        browser = subprocess.Popen(
            [CHROMIUM, *CHROMIUM_ARGS, f"--user-data-dir={tmp_path}", "--remote-debugging-port=0", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert pages.reported.wait(60), "the page did not report"
        finally:
            browser.terminate()
            browser.wait(10)
            pages.shutdown()
    assert pages.report["error"] is None
    assert pages.report["requestId"] == "page-1"
    with server.client() as client:
        body = {"model": server.model, "messages": PROMPTS["story"], "temperature": 0, "max_tokens": 40}
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert pages.report["text"] == whole
    times = pages.report["times"]
    # One by one, not in a lump: forty tokens take a CPU longer than this to compute.
    assert len(times) > 15
    assert times[-1] - times[0] > 50
