"""What the routes of one HTTP server share: the database, the tokens, the hosts and origins it answers to."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from keyloft import limits
from keyloft.core.engine import Engine
from keyloft.errors import InvalidArgument, Unreachable
from keyloft.http.failed_logins import FailedLogins
from keyloft.http.failure_log import FailureLog
from keyloft.http.large_parts import LargeParts
from keyloft.http.meters import HttpMeters
from keyloft.http.origins import Origins
from keyloft.http.problems import Problem
from keyloft.http.replies import HttpReply
from keyloft.http.service_access import ServiceAccess
from keyloft.http.token_file import ValidTokens
from keyloft.nats.errors import overloaded
from keyloft.tuples.named import NamedEngine, check_name
from keyloft.tuples.store import Store

if TYPE_CHECKING:
    from keyloft.http.page.service import ServiceParts


class Monitoring(Protocol):
    """Makes the answers of the routes that need no token."""

    async def metrics(self) -> HttpReply: ...

    async def health(self) -> HttpReply: ...

    async def readiness(self) -> HttpReply: ...


class HttpContext:
    """What all routes share. The engine is set once the database is open; until then, the API answers 503."""

    def __init__(
        self,
        monitoring: Monitoring,
        tokens: ValidTokens,
        origins: Origins,
        *,
        connections: int = limits.HTTP_CONNECTIONS,
        meters: HttpMeters | None = None,
    ) -> None:
        self.monitoring = monitoring
        self.tokens = tokens
        self.origins = origins
        self.failed_logins = FailedLogins()
        self.failures = FailureLog()
        self.large_parts = LargeParts()
        self.engine: Engine | None = None
        self.plugins, self.semantic = ServiceAccess(), ServiceAccess()
        self.most_listeners = int(limits.HTTP_LISTENERS * connections)
        self.meters = meters or HttpMeters()
        self.service: ServiceParts | None = None
        """What the admin page shows; None where there is no page."""
        self._at_start: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []
        self._stores: dict[str | None, Store] = {}

    def check_listeners(self) -> None:
        """Refuse one more client that watches, if there are too many.

        Raises:
            Busy: There are too many.
        """
        if self.meters.watches >= self.most_listeners:
            raise overloaded("too many watches at a time; close some, or try again later")

    def when_opened(self, call: Callable[[], None]) -> None:
        """Have a function called once the database is open."""
        self._at_start.append(call)

    def opened(self, engine: Engine) -> None:
        """The database is open: requests are answered from now on."""
        self.engine = engine
        for call in self._at_start:
            call()

    def when_ending(self, call: Callable[[], None]) -> None:
        """Have a function called when the service is about to end, to end its streams."""
        self._at_end.append(call)

    def end_streams(self) -> None:
        """End all streams and delayed answers, because the service is about to end."""
        self.failed_logins.end()
        self.failures.close()
        for call in self._at_end:
            call()

    def store(self, name: str | None) -> Store:
        """The tuple store with a name; None for the unnamed one.

        Raises:
            InvalidArgument: No store can have this name.
            Problem: The database is not open yet.
        """
        found = self._stores.get(name)
        if found is not None:
            return found
        engine = self.database()
        if name in (".", ".."):
            raise InvalidArgument(
                "name: the stores . and .. can't be reached over HTTP, because URL parsers resolve them"
            )
        if len(self._stores) >= limits.HTTP_KNOWN_STORES:
            self._stores.clear()
        store = Store(engine if name is None else NamedEngine(engine, check_name(name)))
        self._stores[name] = store
        return store

    def database(self) -> Engine:
        """The engine.

        Raises:
            Problem: The database is not open yet.
        """
        if self.engine is None:
            raise Problem(503, Unreachable.code, "the database is not open yet", headers=((b"retry-after", b"1"),))
        return self.engine
