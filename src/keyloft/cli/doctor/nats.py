"""Examines NATS: whether it accepts the login, whether a service answers there, and whether it keeps plugins apart.

What must be refused is tried: the requests name a plugin that there is not, and hold nothing that a service would carry
out, so nothing is read or written even where they are let through.
"""

import asyncio
import importlib.util
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from msgspec.structs import replace

from keyloft import limits
from keyloft.admin import Finding
from keyloft.cli.doctor.bounded import bounded
from keyloft.cli.plugin import check_server_listens
from keyloft.core.urls import without_login
from keyloft.errors import (
    InvalidArgument,
    InvalidPluginName,
    KeyloftError,
    NoService,
    NotPermitted,
    TimedOut,
    Unanswered,
)
from keyloft.plugins import rules
from keyloft.plugins.wire import OPERATIONS
from keyloft.semantic import keys
from keyloft.server.config import Config
from keyloft.server.isolation import ADMIN, SERVICE, logins_in

if TYPE_CHECKING:
    from nats.aio.client import Client as Nats

    from keyloft.nats.connection import Login

_NO_PLUGIN: Final = "keyloft-doctor-nobody"
"""A plugin, and a tenant, that does not exist."""
_KEY: Final = "keyloft-doctor"
_TENANT: Final = keys.tenant_user("")
_LEAST_PAYLOAD_BYTES: Final = limits.PLUGIN_VALUE_BYTES + 8192
"""The largest value, and what a request or an answer has around it."""
_REFUSED: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)
_HOW_TO_ISOLATE: Final = "`keyloft nats-config --plugin NAME …` writes a configuration that keeps plugins apart"


@dataclass(frozen=True, slots=True)
class User:
    """A user who logs in."""

    login: "Login"
    plugin: str | None = None
    """Whose storage it may reach, if it is a plugin."""
    name: str | None = None

    @property
    def inbox(self) -> str:
        name = self.plugin or self.name
        return "_INBOX" if name in (None, ADMIN) else f"_INBOX_{name}"

    @property
    def is_confined(self) -> bool:
        """Whether NATS must keep it apart from others."""
        return self.plugin is not None or (self.name or "").startswith(_TENANT)


async def examine(config: Config, plugin: str | None, logins: Mapping[str, str]) -> list[Finding]:
    """Whether a client is accepted, served, and kept apart from others.

    Args:
        config: Where NATS is, and how to log in.
        plugin: The plugin of that login, if its user name is another.
        logins: Other users to try, with their passwords, as `keyloft nats-config` wrote them.
    """
    if importlib.util.find_spec("nats") is None:
        return [Finding("skipped", "nats", "nats-py is not installed")]
    if not config.nats and not config.nats_port:
        return [Finding("skipped", "nats", "no address is set: `keyloft serve` starts a NATS server on a free port")]
    addresses = list(config.nats) or [f"nats://127.0.0.1:{config.nats_port}"]
    where = ", ".join(map(without_login, addresses))
    try:
        await check_server_listens(addresses, limits.DOCTOR_ANSWER_SECONDS)
    except Unanswered:
        if not config.nats:
            what = f"no address is set, and no program listens at {where}: `keyloft serve` starts a NATS server there"
            return [Finding("skipped", "nats", what)]
        advice = "start it there, or correct --nats; without --nats `keyloft serve` starts one of its own"
        return [Finding("problem", "nats", f"no NATS server answers at {where}", cure=advice)]
    known = _users(logins, config)
    user = _user(config, addresses, plugin)
    if _is_anonymous(config, addresses) and ADMIN in known:
        user = known[ADMIN]
    try:
        async with _connected(addresses, user) as link:
            found = [_reached(where, user, link.nats)]
    except (KeyloftError, OSError) as error:
        return [_not_reached(where, user, error)]
    found += await bounded("service", _service(config, addresses, user), 2 * limits.DOCTOR_ANSWER_SECONDS)
    confined = [one for one in known.values() if one.is_confined and plugin in (None, one.plugin)]
    places, users = (_bare(addresses), confined) if confined else (addresses, [user])
    found += await bounded("isolation", _isolation(config, places, users), limits.DOCTOR_ISOLATION_SECONDS)
    return found


# Users


def _user(config: Config, addresses: list[str], plugin: str | None) -> User:
    login = config.login()
    name = login.user or next((unquote(urlsplit(url).username or "") for url in addresses if "@" in url), "") or None
    if plugin is not None:
        return User(login, plugin, name)
    try:
        return User(login, None if name is None else rules.plugin_name(name), name)
    except InvalidPluginName:
        return User(login, None, name)


def _is_anonymous(config: Config, addresses: list[str]) -> bool:
    login = config.login()
    return login == _without_user(login) and not any("@" in url for url in addresses)


def _bare(addresses: list[str]) -> list[str]:
    """Addresses without a login."""
    return [without_login(address) for address in addresses]


def _without_user(login: "Login") -> "Login":
    return type(login)(ca=login.ca, certificate=login.certificate, key=login.key)


def _users(logins: Mapping[str, str], config: Config) -> dict[str, User]:
    anonymous = _without_user(config.login())
    users = {}
    for name, password in logins.items():
        is_plugin = name not in (SERVICE, ADMIN) and not name.startswith(_TENANT)
        users[name] = User(replace(anonymous, user=name, password=password), name if is_plugin else None, name)
    return users


def read_logins(file: str) -> dict[str, str]:
    """The users of a configuration that `keyloft nats-config` wrote, and their passwords.

    Raises:
        InvalidArgument: It can't be read, or there are none.
    """
    try:
        logins = logins_in(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--nats-config: {file} can't be read: {error}") from None
    if not logins:
        raise InvalidArgument(f"--nats-config: {file} has no users such as `keyloft nats-config` writes them")
    return logins


# Connecting


@dataclass(frozen=True, slots=True)
class _Link:
    nats: "Nats"
    refusals: set[tuple[str, str]]
    """What the server did not permit: publish or subscription, and the subject."""


@asynccontextmanager
async def _connected(addresses: list[str], user: User) -> AsyncIterator[_Link]:
    """A connection as a user; a login of its own takes precedence over one in the address.

    Raises:
        NotPermitted: The server refuses the login.
        Unanswered: The program there does not speak NATS.
    """
    from keyloft.nats.connection import connect

    refusals: set[tuple[str, str]] = set()

    def heard(error: Exception) -> None:
        refusals.update((kind.lower(), subject.lower()) for kind, subject in _REFUSED.findall(str(error)))

    try:
        async with asyncio.timeout(limits.DOCTOR_ANSWER_SECONDS):
            connection = await connect(
                addresses, name="keyloft doctor", login=user.login, on_error=heard, inbox_prefix=user.inbox
            )
    except TimeoutError:
        raise Unanswered(f"the program there did not speak NATS within {limits.DOCTOR_ANSWER_SECONDS:g} s") from None
    except KeyloftError:
        raise
    except Exception as error:
        raise Unanswered(f"the connection failed ({type(error).__name__})") from None
    try:
        yield _Link(connection, refusals)
    finally:
        await connection.close()


def _reached(where: str, user: User, nats: "Nats") -> Finding:
    name = f" as {user.name or user.plugin}" if user.name or user.plugin else ""
    what = f"{where} lets us in{name}"
    if nats.max_payload < _LEAST_PAYLOAD_BYTES:
        return Finding(
            "problem",
            "nats",
            f"{what}, but takes messages of {nats.max_payload:,} bytes at most: too little for the largest values",
            cure=f"set max_payload to {_LEAST_PAYLOAD_BYTES:,} or more in its configuration; 1MB is its default",
        )
    return Finding("ok", "nats", what)


def _not_reached(where: str, user: User, error: Exception) -> Finding:
    if not isinstance(error, NotPermitted):
        return Finding("problem", "nats", f"{where}: {error}", cure="name the address of a NATS server with --nats")
    if user.name is None and user.login == _without_user(user.login):
        advice = "log in with --nats-user and KEYLOFT_NATS_PASSWORD, --nats-creds or KEYLOFT_NATS_TOKEN"
    else:
        advice = "the configuration of the NATS server has the passwords; `keyloft nats-config` writes one"
    return Finding("problem", "nats", f"{where}: {error}", cure=advice)


# The service


async def _service(config: Config, addresses: list[str], user: User) -> list[Finding]:
    """Read a key that does not exist: the reply comes from the database."""
    if user.name == SERVICE or (user.name or "").startswith(_TENANT):
        what = f"{user.name} may not ask for plugins' data"
        return [
            Finding("skipped", "service", what, cure="log in as a plugin or as ADMIN to see whether a service answers")
        ]
    from keyloft.plugins import DatabaseClient

    began = time.perf_counter()
    try:
        async with await DatabaseClient.connect(
            addresses,
            plugin_name=user.plugin or _NO_PLUGIN,
            login=user.login,
            prefix=config.prefixes[0],
            timeout=limits.DOCTOR_ANSWER_SECONDS,
            inbox_prefix=user.inbox,
        ) as client:
            began = time.perf_counter()
            await client.kv.get(_KEY)
    except NoService:
        what = f"no service listens on {config.prefixes[0]}.<plugin>.<operation>"
        return [Finding("warning", "service", what, cure="`keyloft serve`, with the same settings, starts a service")]
    except NotPermitted:
        what = f"this login may not ask {config.prefixes[0]}.{user.plugin or _NO_PLUGIN}.get, or not hear the answer"
        return [
            Finding(
                "problem", "service", what, cure="--plugin names the plugin whose login this is; see its permissions"
            )
        ]
    except TimedOut:
        what = f"no answer within {limits.DOCTOR_ANSWER_SECONDS:g} s"
        return [Finding("problem", "service", what, cure="see the log of the service")]
    except KeyloftError as error:
        return [Finding("problem", "service", f"it answers {error.code}: {error}", cure="see the log of the service")]
    return [
        Finding("ok", "service", f"it answers, from its database, in {1000 * (time.perf_counter() - began):.0f} ms")
    ]


# Isolation


async def _isolation(config: Config, addresses: list[str], users: Sequence[User]) -> list[Finding]:
    attempts = _attempts(config)
    anonymous = await _permitted(_bare(addresses), User(type(users[0].login)(ca=users[0].login.ca)), attempts)
    found = []
    if anonymous is not None:
        if len(anonymous) == len(attempts):
            what = "NATS asks for no login, and any client can read and write every plugin's data"
            return [Finding("warning", "isolation", what, cure=f"if you don't trust all of them: {_HOW_TO_ISOLATE}")]
        what, advice = "NATS accepts clients without a login", "see which user no_auth_user names, or leave it out"
        found.append(
            _too_wide("a client without a login", anonymous)
            if anonymous
            else Finding("warning", "isolation", what, cure=advice)
        )
    confined = [user for user in users if user.is_confined]
    kept: list[str] = []
    for first in range(0, len(confined), limits.DOCTOR_LOGINS_AT_ONCE):
        some = confined[first : first + limits.DOCTOR_LOGINS_AT_ONCE]
        tried = await asyncio.gather(*[_permitted(addresses, user, attempts) for user in some])
        for user, permitted in zip(some, tried, strict=True):
            name = user.plugin or str(user.name)
            if permitted is None:
                advice = "let the NATS server read its configuration again (nats-server --signal reload)"
                found.append(Finding("problem", "isolation", f"NATS refuses the login of {name}", cure=advice))
            elif permitted:
                found.append(_too_wide(name, permitted))
            else:
                kept.append(name)
    if kept:
        what = f"{', '.join(kept)}: all {len(attempts)} attempts per user to reach others were refused"
        found.append(Finding("ok", "isolation", what))
    elif not confined:
        who = (
            f"{users[0].name} may reach more than a plugin"
            if users[0].name
            else "the plugin of this login is not known"
        )
        advice = "log in as a plugin; or --plugin NAME says whose login it is, --nats-config FILE tries all users of it"
        found.append(Finding("skipped", "isolation", f"not tried: {who}", cure=advice))
    return found


def _too_wide(name: str, permitted: Sequence[tuple[str, str]]) -> Finding:
    words = {"publish": "publish to", "subscription": "subscribe to"}
    shown = [f"{words[kind]} {subject}" for kind, subject in permitted[:3]]
    more = f", and {len(permitted) - 3} more" if len(permitted) > 3 else ""
    what = f"{name} is not kept apart: NATS lets it {', '.join(shown)}{more}"
    return Finding("problem", "isolation", what, cure=f"narrow its permissions; {_HOW_TO_ISOLATE}")


def _attempts(config: Config) -> list[tuple[str, str]]:
    """What no plugin and no tenant may do: publish and subscribe to another one's subjects."""
    requests = [f"{prefix}.{_NO_PLUGIN}.{operation}" for prefix in config.prefixes for operation in OPERATIONS]
    requests += [f"{config.semantic_prefix}.{_NO_PLUGIN}.{_NO_PLUGIN}.{operation}" for operation in keys.OPERATIONS]
    everything = [f"{prefix}.>" for prefix in (*config.prefixes, config.semantic_prefix)]
    inboxes = [f"_INBOX_{_NO_PLUGIN}.answer", "_INBOX.answer"]
    heard = [*everything, *requests, *inboxes, f"_INBOX_{_NO_PLUGIN}.>", "_INBOX.>"]
    sent = [*requests, *inboxes]
    return [*[("publish", subject) for subject in sent], *[("subscription", subject) for subject in heard]]


async def _permitted(
    addresses: list[str], user: User, attempts: Iterable[tuple[str, str]]
) -> list[tuple[str, str]] | None:
    """Which of them the server lets through; None if it does not let the user in."""
    try:
        async with _connected(addresses, user) as link:
            for kind, subject in attempts:
                if kind == "publish":
                    await link.nats.publish(subject, b"{}")
                else:
                    await link.nats.subscribe(subject, cb=_forget)
            await link.nats.flush()
            return [(kind, subject) for kind, subject in attempts if (kind, subject.lower()) not in link.refusals]
    except Unanswered:
        return None


async def _forget(message: Any) -> None:
    """Drop a message that arrives only because a permission is too wide."""
