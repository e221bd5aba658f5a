"""A bare Starlette application that answers with the path it was sent, on uvicorn as it is installed."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from bench.harness import child_main


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"key": request.path_params["key"], "value": {"name": "Alice", "score": 42}})


@asynccontextmanager
async def serving(port: int) -> AsyncIterator[None]:
    app = Starlette(routes=[Route("/echo/{key:path}", echo)])
    config = uvicorn.Config(app, port=port, http="httptools", lifespan="off", log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    await server.on_tick(0)
    yield
    await server.shutdown()


if __name__ == "__main__":
    child_main.run(serving(int(sys.argv[1])))
