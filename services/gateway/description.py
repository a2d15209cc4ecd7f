"""``/openapi.json``, and ``/docs``, a page that shows it without anything from elsewhere."""

from __future__ import annotations

from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from services.gateway.openapi import document

PAGE = Path(__file__).with_name("docs.html")


def described() -> list[Route]:
    description, page = orjson.dumps(document()), PAGE.read_text()

    async def openapi(request: Request) -> Response:
        return Response(description, media_type="application/json")

    async def docs(request: Request) -> Response:
        return HTMLResponse(page)

    return [Route("/openapi.json", openapi), Route("/docs", docs)]
