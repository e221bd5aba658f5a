"""The engine on a running service, over its HTTP API: the tuple store alone.

`engine` reads, commits and watches. `api` sends requests, repeats those that may be repeated, and `errors` explains
failures. `entries` and `batches` turn the API's JSON into records and back, `ranges` names the bounds of a scan,
`gets` lets concurrent gets travel together, `watch` follows a stream of `events`.
"""

from keyloft.core.extras import not_installed
from keyloft.errors import CannotOpen

try:
    import aiohttp  # noqa: F401
except ModuleNotFoundError as error:
    raise CannotOpen(not_installed("aiohttp")) from error
