"""The engine on a running service, over its HTTP API: the tuple store alone.

`engine` reads, commits and watches. `api` sends requests, and repeats those that may be repeated; `errors` explains
failures. `entries` and `batches` turn the API's JSON into records and back, `ranges` names the bounds of a scan,
`gets` sends concurrent gets as one request, `watch` follows a stream of `events`.
"""

from keyloft.core.extras import not_installed
from keyloft.errors import CannotOpen

try:
    import aiohttp  # noqa: F401
except ModuleNotFoundError as error:
    raise CannotOpen(not_installed("aiohttp")) from error
