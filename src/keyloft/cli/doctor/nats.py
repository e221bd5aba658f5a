"""Examines NATS: whether it accepts the login, whether a service answers there, and whether it keeps plugins apart.

Requests that NATS must refuse are tried. They name a plugin that does not exist, and hold nothing that a service would
carry out. So nothing is read or written even if NATS lets them through.
"""

import asyncio
import importlib.util
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType
from msgspec.json import decode
from msgspec.structs import replace

from keyloft import limits
from keyloft.admin import Finding
from keyloft.cli.doctor.checks import bounded, ok, problem, skipped, warning
from keyloft.cli.nats_server import check_server_listens
from keyloft.cli.plugin import some_at_once
from keyloft.core.addresses import without_login
from keyloft.errors import InvalidPluginName, KeyloftError, NoService, NotPermitted, TimedOut, Unanswered
from keyloft.plugins import rules
from keyloft.semantic import keys
from keyloft.server.config import Config
from keyloft.server.isolation import ADMIN, SERVICE

if TYPE_CHECKING:
    from nats.aio.client import Client as Nats

    from keyloft.nats.connection import Login
from keyloft.nats.events import EVENTS

_NO_PLUGIN: Final = "keyloft-doctor-nobody"
"""A plugin, and a tenant, that does not exist."""
_KEY: Final = "keyloft-doctor"
_TENANT: Final = keys.tenant_user("")
_LEAST_PAYLOAD_BYTES: Final = limits.PLUGIN_VALUE_BYTES + 8192
"""The size of the largest value, and of what a request or an answer has around it."""
_REFUSED: Final = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)
_USER_INFO: Final = "$SYS.REQ.USER.INFO"
"""Where a NATS server, since 2.10, says as whom a client is logged in."""
_HOW_TO_ISOLATE: Final = "`keyloft nats-config --plugin NAME …` writes a configuration that keeps plugins apart"


Attempt: TypeAlias = tuple[str, str]
"""What a user tries, publish or subscription, and the subject."""


class User(Struct, frozen=True):
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

    @property
    def is_anonymous(self) -> bool:
        """Whether the user has no login; a certificate alone does not count as one."""
        return not (self.name or self.login.token or self.login.credentials)


class _UserData(Struct, frozen=True):
    permissions: Raw | UnsetType = UNSET


class _UserInfo(Struct, frozen=True):
    """The answer of a NATS server to a request to `_USER_INFO`."""

    data: _UserData


async def examine(config: Config, plugin: str | None, logins: Mapping[str, str]) -> list[Finding]:
    """Whether a client is accepted, served, and kept apart from others.

    Args:
        config: Where NATS is, and how to log in.
        plugin: The plugin of that login, if its user name is another.
        logins: Other users to try, with their passwords, as `keyloft nats-config` wrote them.
    """
    if importlib.util.find_spec("nats") is None:
        return [skipped("nats", "nats-py is not installed")]
    if not config.nats and not config.nats_port:
        return [skipped("nats", "no address is set: `keyloft serve` starts a NATS server on a free port")]
    addresses = list(config.nats) or [f"nats://127.0.0.1:{config.nats_port}"]
    bare = [without_login(address) for address in addresses]
    where = ", ".join(bare)
    try:
        await check_server_listens(addresses, limits.DOCTOR_ANSWER_SECONDS)
    except Unanswered:
        if not config.nats:
            what = f"no address is set, and no program listens at {where}: `keyloft serve` starts a NATS server there"
            return [skipped("nats", what)]
        advice = "start it there, or correct --nats; without --nats `keyloft serve` starts one of its own"
        return [problem("nats", f"no NATS server answers at {where}", cure=advice)]
    login = config.login()
    name = login.user or next((unquote(urlsplit(url).username or "") for url in addresses if "@" in url), "") or None
    user = _user(login, name, plugin)
    unnamed = replace(login, credentials=None, token=None)
    known = {name: _user(replace(unnamed, user=name, password=password), name) for name, password in logins.items()}
    if user.is_anonymous and bare == addresses:
        # The file of a leaf node has no ADMIN: then one of its plugins asks.
        user = known.get(ADMIN) or next((one for one in known.values() if one.plugin is not None), user)
    try:
        async with _connected(addresses, user) as (nats, _):
            found = [_reached(where, user, nats.max_payload)]
    except (KeyloftError, OSError) as error:
        return [_not_reached(where, user, error)]
    found += await bounded("service", _service(config, addresses, user), 2 * limits.DOCTOR_ANSWER_SECONDS)
    confined = [one for one in known.values() if one.is_confined and plugin in (None, one.plugin)]
    attempts = _isolation(config, bare, confined) if confined else _isolation(config, addresses, [user])
    return [*found, *await bounded("isolation", attempts, limits.DOCTOR_ISOLATION_SECONDS)]


# Users


def _user(login: "Login", name: str | None, plugin: str | None = None) -> User:
    """A user. `plugin` says whose login it is, if a plugin does not log in under its own name."""
    if plugin is None and name is not None:
        with suppress(InvalidPluginName):
            plugin = rules.plugin_name(name)
    return User(login, plugin, name)


# Connecting


@asynccontextmanager
async def _connected(addresses: list[str], user: User) -> AsyncIterator[tuple["Nats", set[Attempt]]]:
    """A connection as a user, and the attempts on it that the server has refused so far.

    The user's own login takes precedence over one in the address.

    Raises:
        NotPermitted: The server refuses the login.
        Unanswered: The program there does not speak NATS.
    """
    from keyloft.nats.connection import connect

    refused: set[Attempt] = set()

    def heard(error: Exception) -> None:
        refused.update((kind.lower(), subject.lower()) for kind, subject in _REFUSED.findall(str(error)))

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
        yield connection, refused
    finally:
        await connection.close()


def _reached(where: str, user: User, max_payload: int) -> Finding:
    name = user.name or user.plugin
    what = f"{where} accepts the login{f' of {name}' if name else ''}"
    if max_payload >= _LEAST_PAYLOAD_BYTES:
        return ok("nats", what)
    what += f", but takes messages of {max_payload:,} bytes at most: too little for the largest values"
    advice = f"set max_payload to {_LEAST_PAYLOAD_BYTES:,} or more in its configuration; 1MB is its default"
    return problem("nats", what, cure=advice)


def _not_reached(where: str, user: User, error: Exception) -> Finding:
    if not isinstance(error, NotPermitted):
        advice = "--nats names the address of a NATS server; --nats-ca, --nats-cert and --nats-key are its certificates"
    elif user.is_anonymous:
        advice = "log in with --nats-user and KEYLOFT_NATS_PASSWORD, --nats-creds or KEYLOFT_NATS_TOKEN"
    else:
        advice = "the configuration of the NATS server has the passwords; `keyloft nats-config` writes one"
    return problem("nats", f"{where}: {error}", cure=advice)


# The service


async def _service(config: Config, addresses: list[str], user: User) -> list[Finding]:
    """Read a key that does not exist: the reply comes from the database."""
    if user.name == SERVICE or (user.name or "").startswith(_TENANT):
        advice = "log in as a plugin or as ADMIN to see whether a service answers"
        return [skipped("service", f"{user.name} may not ask for plugins' data", cure=advice)]
    from keyloft.plugins import DatabaseClient

    prefix, plugin = config.prefixes[0], user.plugin or _NO_PLUGIN
    try:
        async with await DatabaseClient.connect(
            addresses,
            plugin_name=plugin,
            login=user.login,
            prefix=prefix,
            timeout=limits.DOCTOR_ANSWER_SECONDS,
            inbox_prefix=user.inbox,
        ) as client:
            began = time.perf_counter()
            await client.kv.get(_KEY)
            milliseconds = 1000 * (time.perf_counter() - began)
    except NoService:
        what = f"no service listens on {prefix}.<plugin>.<operation>"
        advice = "`keyloft serve`, with the same settings, starts a service"
        return [warning("service", what, cure=advice)]
    except NotPermitted:
        what = f"this login may not publish to {prefix}.{plugin}.get, or may not receive the reply"
        advice = "--plugin names the plugin whose login this is; see its permissions"
        return [problem("service", what, cure=advice)]
    except TimedOut:
        what = f"no answer within {limits.DOCTOR_ANSWER_SECONDS:g} s"
        return [problem("service", what, cure="see the log of the service")]
    except KeyloftError as error:
        return [problem("service", f"it answers {error.code}: {error}", cure="see the log of the service")]
    return [ok("service", f"it answers, from its database, in {milliseconds:.0f} ms")]


# Isolation


async def _isolation(config: Config, addresses: list[str], users: Sequence[User]) -> list[Finding]:
    attempts = _attempts(config)
    bare = [without_login(address) for address in addresses]
    anonymous = await _permitted(bare, User(type(users[0].login)(ca=users[0].login.ca)), attempts)
    if anonymous is not None and len(anonymous) == len(attempts):
        what = "NATS asks for no login, and any client can read and write every plugin's data"
        return [warning("isolation", what, cure=f"if you don't trust all of them: {_HOW_TO_ISOLATE}")]
    found = []
    if anonymous:
        found.append(_too_wide("a client without a login", anonymous))
    elif anonymous is not None:
        advice = "see which user no_auth_user names, or leave it out"
        found.append(warning("isolation", "NATS accepts clients without a login", cure=advice))
    confined = [user for user in users if user.is_confined]
    if not confined:
        [user] = users
        who = f"{user.name} may reach more than a plugin" if user.name else "the plugin of this login is not known"
        advice = "log in as a plugin; or --plugin NAME says whose login it is, --nats-config FILE tries all users of it"
        return [*found, skipped("isolation", f"not tried: {who}", cure=advice)]
    kept: list[str] = []
    at_once = limits.DOCTOR_LOGINS_AT_ONCE
    tried = await some_at_once(lambda user: _permitted(addresses, user, attempts), confined, at_once)
    for user, permitted in zip(confined, tried, strict=True):
        name = user.plugin or str(user.name)
        if permitted is None:
            advice = "let the NATS server read its configuration again (nats-server --signal reload)"
            found.append(problem("isolation", f"NATS refuses the login of {name}", cure=advice))
        elif permitted:
            found.append(_too_wide(name, permitted))
        else:
            kept.append(name)
    if kept:
        what = f"{', '.join(kept)}: all {len(attempts)} attempts per user to reach others were refused"
        found.append(ok("isolation", what))
    return found


def _too_wide(name: str, permitted: Sequence[Attempt]) -> Finding:
    words = {"publish": "publish to", "subscription": "subscribe to"}
    shown = [f"{words[kind]} {subject}" for kind, subject in permitted[:3]]
    more = f", and {len(permitted) - 3} more" if len(permitted) > 3 else ""
    what = f"{name} is not kept apart: NATS lets it {', '.join(shown)}{more}"
    return problem("isolation", what, cure=f"narrow its permissions; {_HOW_TO_ISOLATE}")


def _attempts(config: Config) -> list[Attempt]:
    """What no plugin and no tenant may do: publish and subscribe to another one's subjects."""
    operations = (*rules.OPERATIONS, f"{EVENTS}.x")
    requests = [f"{prefix}.{_NO_PLUGIN}.{operation}" for prefix in config.prefixes for operation in operations]
    in_project = f"{config.semantic_prefix}.{_NO_PLUGIN}.{_NO_PLUGIN}"
    requests += [f"{in_project}.{operation}" for operation in (*keys.OPERATIONS, f"{EVENTS}.x")]
    everything = [f"{prefix}.>" for prefix in (*config.prefixes, config.semantic_prefix)]
    inboxes = [f"_INBOX_{_NO_PLUGIN}.answer", "_INBOX.answer"]
    heard = [*everything, *requests, *inboxes, f"_INBOX_{_NO_PLUGIN}.>", "_INBOX.>"]
    sent = [*requests, *inboxes]
    return [*[("publish", subject) for subject in sent], *[("subscription", subject) for subject in heard]]


async def _permitted(addresses: list[str], user: User, attempts: Sequence[Attempt]) -> list[Attempt] | None:
    """The attempts that the server does not refuse; None if it refuses the login."""
    try:
        async with _connected(addresses, user) as (nats, refused):
            # A service that receives the attempts logs each of them as a refused request.
            if await _is_unrestricted(nats, refused):
                return list(attempts)
            for kind, subject in attempts:
                if kind == "publish":
                    await nats.publish(subject, b"[]")  # which every operation refuses
                else:
                    await nats.subscribe(subject, cb=_forget)
            await nats.flush()
            return [(kind, subject) for kind, subject in attempts if (kind, subject.lower()) not in refused]
    except Unanswered:
        return None


async def _is_unrestricted(nats: "Nats", refused: set[Attempt]) -> bool:
    """Whether the server says that this user has no permissions, and so may do everything. An old one does not say."""
    inbox = nats.new_inbox()
    answers = await nats.subscribe(inbox)
    await nats.publish(_USER_INFO, reply=inbox)
    await nats.flush()
    if refused:
        return False
    try:
        answer = await answers.next_msg(limits.DOCTOR_USER_INFO_SECONDS)
        return decode(answer.data, type=_UserInfo).data.permissions is UNSET
    except (TimeoutError, DecodeError):
        return False


async def _forget(message: Any) -> None:
    """Drop a message that arrives only because a permission is too wide."""
