"""The route that shows a client which store it has reached."""

from collections.abc import Sequence

import keyloft
from keyloft import limits
from keyloft.core.records import Latest, Now, StoreId
from keyloft.http.context import HttpContext
from keyloft.http.descriptions import INFO
from keyloft.http.replies import HttpReply
from keyloft.http.requests import HttpRequest
from keyloft.http.routing import ApiRoute
from keyloft.http.wire import shown_time, to_json


def routes(context: HttpContext) -> Sequence[ApiRoute]:
    """The route /v1/info."""

    async def info(request: HttpRequest) -> HttpReply:
        request.expect_query()
        store, now, latest = await context.database().read(StoreId(), Now(), Latest())
        body = {
            "store": store,
            "version": keyloft.__version__,
            "now": shown_time(now),
            "versionstamp": str(latest),
            "max_value_bytes": limits.VALUE_BYTES,
        }
        return HttpReply(to_json(body))

    return [ApiRoute(path="/v1/info", handlers={"GET": info}, described=INFO)]
