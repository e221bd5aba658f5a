"""The operations of plugins and workflows over HTTP: the same as over NATS, with the same bodies and codes."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias
from urllib.parse import unquote

import msgspec
from msgspec import Raw, Struct

from keyloft import limits
from keyloft.errors import DatabaseError
from keyloft.http import audit_log
from keyloft.http.context import HttpContext
from keyloft.http.operation_schemas import described_operations
from keyloft.http.problems import Problem
from keyloft.http.replies import HttpReply
from keyloft.http.requests import ClientGone, HttpRequest
from keyloft.http.routing import ApiRoute
from keyloft.http.service_access import ServiceAccess, refusal_of, was_carried_out
from keyloft.http.tokens import AccessToken
from keyloft.plugins.service import DatabaseService
from keyloft.semantic.service import SemanticService

PLUGINS: Final = "/v1/plugins/{plugin}"
SEMANTIC: Final = "/v1/semantic/{tenant}/{project}"
"""The beginnings of the services' paths."""

Area: TypeAlias = Literal["plugin", "tenant"]

_READS: Final[Mapping[Area, frozenset[str]]] = {
    "plugin": frozenset({"get", "get_many", "list", "count", "usage"}),
    "tenant": frozenset({"get", "list", "audit"}),
}
"""The operations for which a token that may read is enough; watches have routes of their own."""
_READ_BY_DEFAULT: Final = frozenset({"locks", "dead_letters"})
"""Operations that read or write, depending on their field `action`; without it, they list."""
_LISTING: Final = (None, "list")


class _Action(Struct):
    action: str | None = None


_read_action = msgspec.json.Decoder(_Action).decode


class _Named(Struct):
    """All fields in which a request may name keys."""

    key: str | None = None
    keys: list[str] = []
    prefix: str | None = None
    entries: dict[str, Raw] = {}
    operations: list["_Named"] = []
    requests: list["_Named"] = []

    def all(self) -> list[str]:
        found = [*self.keys, *self.entries]
        if self.key is not None:
            found.append(self.key)
        if self.prefix is not None:
            found.append(f"{self.prefix}…")
        return [*found, *[key for part in (*self.operations, *self.requests) for key in part.all()]]


_read_named = msgspec.json.Decoder(_Named).decode


class OperationHandler:
    """Answers the requests for one service."""

    def __init__(self, access: ServiceAccess, area: Area, names: Sequence[str]) -> None:
        """Args:
        access: The service.
        area: How the scopes of tokens call an owner: plugin or tenant.
        names: The parameters of the path that name an owner: a plugin, or a tenant and a project.
        """
        self.access = access
        self._area = area
        self.names = names

    def names_of(self, request: HttpRequest) -> list[str]:
        """What the path of a request names: a plugin, or a tenant and a project."""
        return [unquote(request.parameter(name) or "") for name in self.names]

    def check_scope(self, token: AccessToken, names: Sequence[str], *, write: bool = False) -> None:
        """Raises:
        NotPermitted: The owner is out of the token's scopes.
        """
        token.check_owner(self._area, names[0], write=write)

    async def carry_out(self, request: HttpRequest) -> HttpReply:
        """Answer a request for an operation."""
        # Not percent-decoded, as in routing: else `%77atch` would get here as `watch`, which stores a lease.
        names, operation = self.names_of(request), request.parameter("operation") or ""
        request.expect_query()
        is_read = operation in _READS[self._area]
        self.check_scope(request.token, names, write=not is_read and operation not in _READ_BY_DEFAULT)
        if request.content_type() not in ("application/json", ""):
            raise request.wrong_type("application/json")
        data = await self.access.body(request, names)
        if is_read:
            await request.room()
        if operation in _READ_BY_DEFAULT and not (is_read := _is_listing(data)):
            self.check_scope(request.token, names, write=True)
        try:
            reply = await self.access.ask(request, names, operation, data)
        except ClientGone:
            if not is_read:
                self.log(request.token, names, operation, data, is_read=False, outcome=audit_log.CLIENT_GONE)
            raise
        if not was_carried_out(reply):
            refused = refusal_of(reply)
            if _shows_values(refused):
                self.log(request.token, names, "read", data, is_read=True)
            elif refused.code == DatabaseError.code and not is_read:
                self.log(request.token, names, operation, data, is_read=False, outcome=audit_log.DATABASE_FAILED)
            raise refused
        self.log(request.token, names, operation, data, is_read=is_read)
        return HttpReply(reply)

    def log(
        self,
        token: AccessToken,
        names: Sequence[str],
        operation: str,
        data: bytes,
        *,
        is_read: bool,
        outcome: str | None = None,
    ) -> None:
        """Write a line of the audit log for a request that was carried out, or that may have been (see `outcome`)."""
        if (is_read and not token.is_admin) or not audit_log.logger.isEnabledFor(logging.INFO):
            return
        action = f"{operation} of {self._area} {'/'.join(names)}"
        if is_read:
            audit_log.read(token, action, None, _keys(data))
        else:
            audit_log.wrote(token, action, None, _keys(data), outcome=outcome)


def _shows_values(refused: Problem) -> bool:
    """Whether a refusal shows stored entries, as a conflict does."""
    found = [refused.more.get(name) for name in ("current", "conflicts")]
    return any([raw is not None and bytes(raw) not in (b"null", b"[]") for raw in found])


def _is_listing(data: bytes) -> bool:
    """Whether a request with an `action` asks for a list; a request that can't be read counts as a write."""
    try:
        return _read_action(data or b"{}").action in _LISTING
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _keys(data: bytes) -> list[str]:
    """The keys that a request names, without control characters; if there are many, the first of them."""
    if len(data) > limits.AUDITED_BYTES:
        return [f"in {len(data):,} bytes"]  # reading so much again would delay other requests
    try:
        found = _read_named(data or b"{}").all()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    shown = [ascii(key)[1:-1] for key in found[: limits.AUDITED_KEYS]]
    return shown if len(found) == len(shown) else [*shown, f"and {len(found) - len(shown)} more"]


def plugin_operations(context: HttpContext) -> OperationHandler:
    """The handler for plugins."""
    return OperationHandler(context.plugins, "plugin", ("plugin",))


def semantic_operations(context: HttpContext) -> OperationHandler:
    """The handler for workflows."""
    return OperationHandler(context.semantic, "tenant", ("tenant", "project"))


def routes(context: HttpContext) -> list[ApiRoute]:
    """The routes of both services."""
    plugins, semantic = plugin_operations(context), semantic_operations(context)
    return [
        ApiRoute(
            path=f"{PLUGINS}/{{operation}}",
            handlers={"POST": plugins.carry_out},
            paths=described_operations(PLUGINS, "plugins", plugins.names, DatabaseService.messages),
        ),
        ApiRoute(
            path=f"{SEMANTIC}/{{operation}}",
            handlers={"POST": semantic.carry_out},
            paths=described_operations(SEMANTIC, "semantic", semantic.names, SemanticService.messages),
        ),
    ]
