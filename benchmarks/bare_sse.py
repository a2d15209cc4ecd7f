"""The least an SSE server of this kind can cost: Starlette on uvicorn, httptools and uvloop, one process, no engine.

    python -m benchmarks.bare_sse --port 8000

POST /v1/completions streams max_tokens events as large as an engine's, one per pass of the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "bare"


def event(choices: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
    head = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 0, "model": MODEL}
    return b"data: " + orjson.dumps({**head, "choices": choices, "usage": usage, "system_fingerprint": None}) + b"\n\n"


def choice(finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}


async def completions(request: Request) -> Response:
    asked = orjson.loads(await request.body())
    count, prompt = asked["max_tokens"], len(asked["prompt"])

    async def events() -> AsyncIterator[bytes]:
        for index in range(count):
            yield event([choice("length" if index == count - 1 else None)], None)
            await asyncio.sleep(0)
        yield event([], {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count})
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models)]
    app = Starlette(routes=routes)
    uvicorn.run(app, port=args.port, loop="uvloop", http="httptools", log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
