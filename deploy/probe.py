"""Exits 0 when the URL given answers 200 within three seconds; else prints why not. Standard library only."""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit


def probe(url: str) -> str:
    """Why ``url`` is not well; empty when it is. No proxy from the environment is used."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=3)
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        body = response.read(500).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {error!r}"
    finally:
        connection.close()
    return "" if response.status == 200 else f"{url}: {response.status} {body}"


if __name__ == "__main__":
    sys.exit(probe(sys.argv[1]) or 0)
