"""Serves an SQLite file over HTTP, for tests that kill it:  python -m tests.http.serve_file FILE PORT TOKEN"""

import asyncio
import sys
from typing import cast

from keyloft.engines import open_engine
from keyloft.http.app import HttpApp
from keyloft.http.context import HttpContext, Monitoring
from keyloft.http.listener import HttpListener
from keyloft.http.origins import Origins
from keyloft.http.token_file import ValidTokens
from keyloft.http.tokens import admin_token


async def serve(file: str, port: int, token: str) -> None:
    context = HttpContext(cast(Monitoring, None), ValidTokens((admin_token(token),)), Origins())
    context.engine = await open_engine(file)
    await HttpListener(HttpApp(context)).start("127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
