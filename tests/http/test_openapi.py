"""The OpenAPI document: it is whole, and the server keeps what it promises for whatever schemathesis makes of it."""

import re

import pytest

from keyloft.http.app import HttpApp, whole_document
from tests.http.api import ADMIN_TOKEN, running_api
from tests.http.conformance import check_answers


async def test_every_route_is_described() -> None:
    async with running_api() as api:
        document = (await api.client.get("/openapi.json", headers={"authorization": ""})).json()
        assert document == whole_document()
        wanted = {
            (re.sub(r":\w+}", "}", path), method.lower())
            for route in HttpApp(api.context).routes
            for path, methods in (route.paths or {route.path: route.handlers}).items()
            for method in methods
        }
        assert {(path, method) for path, methods in document["paths"].items() for method in methods} == wanted
        names = [each["operationId"] for path in document["paths"].values() for each in path.values()]
        assert len(names) == len({*names})


@pytest.mark.slow
@pytest.mark.blocks_the_loop
async def test_the_server_keeps_what_its_document_promises() -> None:
    # Streams don't end, a named store is as the unnamed one, and services are not running here.
    left_out = ("/watch", "{store}", "/v1/plugins", "/v1/semantic")
    document = whole_document()
    document["paths"] = {
        path: operations
        for path, operations in document["paths"].items()
        if not any([part in path for part in left_out])
    }
    async with running_api() as api:
        await check_answers(document, f"http://127.0.0.1:{api.port}", ADMIN_TOKEN, 3)
