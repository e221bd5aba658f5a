"""HTTP clients for tests."""

from typing import Any

import httpx


def http_client(base_url: str = "", **options: Any) -> httpx.AsyncClient:
    """A client without TLS; the options are those of `httpx.AsyncClient`."""
    # A client that verifies certificates reads all that the machine trusts: 20 ms of a processor, for each test.
    return httpx.AsyncClient(base_url=base_url, verify=False, **options)
