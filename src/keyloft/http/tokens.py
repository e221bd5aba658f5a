"""Access tokens: who may do what over HTTP.

A token is 256 random bits. The configuration holds its SHA-256, so that a leaked file is of no use. A slow hash, as for
passwords, would add nothing: 2^256 tokens can't be tried, and each request would take longer.
"""

import hashlib
import hmac
import re
import secrets
from collections import Counter
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from keyloft.core import key_text, keys
from keyloft.errors import InvalidArgument, InvalidInput, NotPermitted
from keyloft.plugins.rules import plugin_name
from keyloft.tuples.named import check_name

PREFIX: Final = "kl_"
"""How tokens begin, so that people and scanners of secrets recognize them."""
ADMIN: Final = "admin"
ANY: Final = "*"

_FORMS: Final = (
    "expected admin, or an access and an area, as in read:kv/users: the access is status, read or write; the area is "
    "kv, kv/PREFIX, db/NAME, db/NAME/PREFIX, plugin/NAME or tenant/NAME; the NAME * stands for all"
)
_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class TokenScope(Struct, frozen=True):
    """One thing that a token may do: read, or read and write, in one area."""

    may_write: bool
    area: Literal["kv", "plugin", "tenant"]
    name: str | None
    """Of the store (None for the unnamed one), plugin or tenant; * for all."""
    start: bytes = b""
    """In a store: the encoded key that the scope covers, with all keys below it."""
    shows_values: bool = True
    """False for `status:`, with which the admin page shows everything but values, and the API only `/v1/info`."""

    @property
    def end(self) -> bytes:
        return self.start + keys.LAST

    @classmethod
    def read(cls, text: str) -> "TokenScope":
        """The scope that a text stands for.

        Raises:
            InvalidArgument: It is not the text of a scope.
        """
        access, _, rest = text.partition(":")
        area, slash, where = rest.partition("/")
        if access not in ("status", "read", "write") or (slash and not where):
            raise InvalidArgument(f"scope: {_FORMS}; got {text!a}")
        may_write, shows = access == "write", access != "status"
        try:
            match area:
                case "kv":
                    return cls(may_write, "kv", None, _encoded(where), shows)
                case "db" if where:
                    name, _, prefix = where.partition("/")
                    return cls(may_write, "kv", name if name == ANY else check_name(name), _encoded(prefix), shows)
                case "plugin" if where:
                    return cls(may_write, "plugin", where if where == ANY else plugin_name(where), b"", shows)
                case "tenant" if where and re.fullmatch(r"\*|[a-z0-9_-]+", where):
                    return cls(may_write, "tenant", where, b"", shows)
        except InvalidInput as error:
            raise InvalidArgument(f"scope: {error}") from None
        raise InvalidArgument(f"scope: {_FORMS}; got {text!a}")


def _encoded(prefix: str) -> bytes:
    return keys.encode_prefix(key_text.read_prefix(prefix))


def _scope_text(access: str, store: str | None, key: keys.TupleKey = ()) -> str:
    """A scope that covers a key and its siblings, as the file of tokens has it."""
    where = key_text.write(key[:-1] or key)
    return f"{access}:{'kv' if store is None else f'db/{store}'}{'/' if where else ''}{where}"


class AccessToken(Struct, frozen=True, eq=False):
    """A token as the service knows it."""

    name: str
    digest: bytes
    is_admin: bool
    scopes: tuple[TokenScope, ...] = ()
    expires: datetime | None = None

    def has_expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC) >= self.expires

    def check_key(self, store: str | None, key: bytes, *, write: bool = False, status: bool = False) -> None:
        """Refuse a key that is out of the token's scopes; `status` if the answer shows no value.

        Raises:
            NotPermitted: The key is out of its scopes.
        """
        if self.is_admin:
            return
        for scope in self.scopes:
            if (
                scope.start <= key < scope.end
                and (scope.may_write or not write)
                and (scope.shows_values or status)
                and scope.area == "kv"
                and (scope.name == store or (scope.name == ANY and store is not None))
            ):
                return
        access = "write" if write else "status" if status else "read"
        parts = keys.decode(key)
        # The message may name the key, because the caller has sent it.
        what = key_text.write(parts) or "all keys of this store"
        raise self._refusal(write, f"{what}: it needs a scope such as {_scope_text(access, store, parts)}")

    def check_range(
        self, store: str | None, start: bytes, end: bytes, *, write: bool = False, status: bool = False
    ) -> None:
        """Refuse a range of keys, `[start, end)`, in the same way."""
        if self.is_admin:
            return
        for scope in self.scopes:
            if (
                scope.start <= start
                and end <= scope.end
                and (scope.may_write or not write)
                and (scope.shows_values or status)
                and scope.area == "kv"
                and (scope.name == store or (scope.name == ANY and store is not None))
            ):
                return
        raise self._refusal(write, "all keys of this range; name a prefix that is within its scopes")

    def check_store(self, store: str | None) -> None:
        """Refuse a commit that names no key, unless the token may write somewhere in the store.

        Raises:
            NotPermitted: The token may not write there.
        """
        if self.is_admin:
            return
        for scope in self.scopes:
            if (
                scope.may_write
                and scope.area == "kv"
                and (scope.name == store or (scope.name == ANY and store is not None))
            ):
                return
        raise self._refusal(True, f"in this store: it needs a scope such as {_scope_text('write', store)}")

    def check_owner(
        self, area: Literal["plugin", "tenant"], name: str, *, write: bool = False, status: bool = False
    ) -> None:
        """Refuse a plugin or tenant that is out of the token's scopes; `status` if the answer shows no value."""
        if self.is_admin:
            return
        for scope in self.scopes:
            is_within = scope.area == area and scope.name in (name, ANY)
            if is_within and (scope.may_write or not write) and (scope.shows_values or status):
                return
        access = "write" if write else "status" if status else "read"
        raise self._refusal(write, f"what belongs to the {area} {name}: it needs the scope {access}:{area}/{name}")

    def check_admin(self) -> None:
        """Refuse a token that is not an admin token."""
        if not self.is_admin:
            raise NotPermitted(f"the token {self.name} may not do this: only an admin token may")

    def _refusal(self, write: bool, what: str) -> NotPermitted:
        return NotPermitted(f"the token {self.name} may not {'write' if write else 'read'} {what}")


PUBLIC: Final = AccessToken("-", b"", is_admin=False)
"""Stands for the sender of a request that needs no token."""


class DeclaredToken(Struct, forbid_unknown_fields=True):
    """A token as the file of tokens has it."""

    name: str
    sha256: str
    scopes: list[str]
    expires: datetime | None = None

    def checked(self) -> AccessToken:
        """The token that it declares.

        Raises:
            InvalidArgument: A field can't be used.
        """
        if not _NAME.fullmatch(self.name):
            raise InvalidArgument("name: expected 1 to 64 characters, each one of A-Z a-z 0-9 . _ @ -")
        if not _DIGEST.fullmatch(self.sha256):
            raise InvalidArgument(f"sha256 of {self.name}: expected 64 hex digits, as `keyloft token new` prints them")
        if not self.scopes:
            raise InvalidArgument(f"scopes of {self.name}: {_FORMS}")
        if self.expires is not None and self.expires.utcoffset() is None:
            raise InvalidArgument(f"expires of {self.name}: expected a time with a zone, as in 2030-01-01T00:00:00Z")
        try:
            scopes = tuple([TokenScope.read(text) for text in self.scopes if text != ADMIN])
        except InvalidArgument as error:
            raise InvalidArgument(f"token {self.name}: {error}") from None
        return AccessToken(self.name, bytes.fromhex(self.sha256), ADMIN in self.scopes, scopes, self.expires)


def read_declared(declared: object) -> tuple[AccessToken, ...]:
    """The tokens that a parsed file of tokens declares.

    Raises:
        InvalidArgument: It declares something else, or a name twice.
    """
    try:
        tokens = msgspec.convert(declared, dict[Literal["token"], list[DeclaredToken]]).get("token", [])
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"expected [[token]] tables with name, sha256 and scopes: {error}") from None
    found = tuple([token.checked() for token in tokens])
    twice = [name for name, count in Counter([token.name for token in found]).items() if count > 1]
    if twice:
        raise InvalidArgument(f"name: expected a different one for each token, got several times: {', '.join(twice)}")
    return found


def new_token() -> str:
    """A new random token."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> bytes:
    """What the configuration holds of a token."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def admin_token(token: str, name: str = ADMIN) -> AccessToken:
    """The one admin token that is set by KEYLOFT_HTTP_TOKEN, or made at the start."""
    return AccessToken(name, digest_of(token), is_admin=True)


def matching(tokens: tuple[AccessToken, ...], given: str) -> AccessToken | None:
    """The valid token that was given, or None. The time this takes does not show how much of the text is right."""
    digest, found = digest_of(given), None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            found = token
    return None if found is None or found.has_expired() else found


def declaration(name: str, token: str, scopes: list[str], expires: datetime | None = None) -> str:
    """The lines for the file of tokens.

    Raises:
        InvalidArgument: The name or a scope can't be used.
    """
    DeclaredToken(name, digest_of(token).hex(), scopes, expires).checked()
    shown: dict[str, Any] = {"name": name, "sha256": digest_of(token).hex(), "scopes": scopes}
    lines = ["[[token]]", *[f"{field} = {msgspec.json.encode(value).decode()}" for field, value in shown.items()]]
    if expires is not None:
        lines.append(f"expires = {expires.astimezone(UTC).isoformat().replace('+00:00', 'Z')}")
    return "\n".join(lines)
