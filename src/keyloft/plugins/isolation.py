"""Writes the configuration of a nats-server that keeps plugins apart, whatever they try.

Without it a plugin is whom its subjects say it is. With it every plugin has a user of its own, and the server refuses
whatever leaves that plugin's subjects and its inbox:

    user        publishes to                              subscribes to             (for every prefix, not db.kv alone)
    trivia      db.kv.trivia.{set,get,delete,list}        _INBOX_trivia.>
    SERVICE     the inboxes                               db.kv.>, in a queue group; $SRV.>; _INBOX_SERVICE.>
    ADMIN       db.kv.>, $SRV.>                           _INBOX.>, db.kv.>, $SRV.>

A plugin connects with its inbox prefix: `nats.connect(url, **isolation.plugins["trivia"].options())`. No plugin can be
called SERVICE or ADMIN: plugin names are lowercase.

What it can't stop: a plugin may name another one's inbox as the reply subject of its own request, and the server does
not look at reply subjects. Such an answer is only heard by a client that waits on that very subject, and clients make
theirs too random to guess.
"""

import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypedDict

from keyloft.errors import InvalidArgument
from keyloft.plugins import rules
from keyloft.plugins.rules import PREFIXES
from keyloft.plugins.wire import OPERATIONS

SERVICE: Final = "SERVICE"
ADMIN: Final = "ADMIN"

# The first part can't be one of NATS's own, such as $SYS or _INBOX_trivia.
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*", re.ASCII)
_LISTEN: Final = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}", re.ASCII)
# What can stand between quotes of the configuration as it is.
_PASSWORD: Final = re.compile(r"[!#-&(-\[\]-~]+", re.ASCII)
_PASSWORD_BYTES: Final = 24


class ConnectOptions(TypedDict):
    """What `nats.connect` has to be told, besides the address."""

    user: str
    password: str
    inbox_prefix: str


@dataclass(frozen=True, slots=True)
class User:
    """How one user connects; a password is not shown."""

    name: str
    password: str = field(repr=False)
    inbox_prefix: str

    def options(self) -> ConnectOptions:
        return {"user": self.name, "password": self.password, "inbox_prefix": self.inbox_prefix}


@dataclass(frozen=True, slots=True)
class Isolation:
    """A configuration of nats-server, and the users that it knows."""

    text: str = field(repr=False)
    plugins: Mapping[str, User]
    service: User
    admin: User

    def write(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Write the configuration to a file that only its owner can read.

        Raises:
            InvalidArgument: The file exists and is not to be replaced, or can't be written.
        """
        target = Path(path)
        try:
            if replace:
                _replace(target, self.text)
            else:
                _create(target, self.text)
        except FileExistsError:
            raise InvalidArgument(f"{target} exists already, with passwords that may be in use") from None
        except OSError as error:
            raise InvalidArgument(f"{target} can't be written: {error.strerror}") from error


def isolate(
    plugins: Iterable[str],
    *,
    prefixes: Sequence[str] = PREFIXES,
    passwords: Mapping[str, str] | None = None,
    listen: str = "127.0.0.1:4222",
) -> Isolation:
    """Make the configuration for some plugins.

    Args:
        plugins: Their names.
        prefixes: What the service's subjects begin with.
        passwords: By user: a plugin's name, `SERVICE` or `ADMIN`; plain, or a bcrypt hash as nats-server takes them.
            Users without one get a random one. To add a plugin to a configuration in use, pass the passwords in use.
        listen: Where the server listens, as host:port.

    Raises:
        InvalidPluginName: No plugin can have this name.
        InvalidArgument: A plugin is named twice; or a prefix, password or address can't be used.
    """
    if isinstance(plugins, str):
        raise InvalidArgument("plugins must be several names, not one string")
    names = _unlike([rules.plugin_name(name) for name in plugins], "plugin")
    spaces = _prefixes(prefixes)
    if _LISTEN.fullmatch(listen) is None:
        raise InvalidArgument("listen must be host:port, as in 127.0.0.1:4222")
    given = dict(passwords or {})
    service = User(SERVICE, _password(given, SERVICE), _inbox(SERVICE))
    # The prefix that every client has by itself: the operator's tools need no option.
    admin = User(ADMIN, _password(given, ADMIN), "_INBOX")
    users = {name: User(name, _password(given, name), _inbox(name)) for name in names}
    if given:
        raise InvalidArgument(f"passwords for users that there are not: {', '.join(sorted(map(repr, given)))}")
    return Isolation(_text(users, service, admin, spaces, listen), users, service, admin)


def _text(users: Mapping[str, User], service: User, admin: User, prefixes: Sequence[str], listen: str) -> str:
    requests = [f"{prefix}.>" for prefix in prefixes]
    lines = [
        "# A NATS server on which plugins can't reach each other's data. Start it with: nats-server -c FILE",
        "# This file holds passwords: only the user that runs the server should be able to read it.",
        "",
        f'listen: "{listen}"',
        "",
        "# There is no user for those who bring no password: they are refused.",
        "authorization {",
        "  users: [",
        "    # The plugin service. It hears all requests, and only in a queue group, so that each is carried out once.",
        "    # It speaks to inboxes only. Not by allow_responses: that would let it answer to any subject which a",
        "    # request names as its reply subject, another plugin's «set» included.",
        *_user(
            service,
            publish=[f"{user.inbox_prefix}.>" for user in (*users.values(), admin)],
            subscribe=[*[f"{request} >" for request in requests], "$SRV.>", f"{service.inbox_prefix}.>"],
        ),
        "",
        "    # The operator: all plugins' data, and the state of the services.",
        *_user(
            admin,
            publish=[*requests, "$SRV.>"],
            subscribe=[f"{admin.inbox_prefix}.>", *requests, "$SRV.>"],
        ),
    ]
    for name, user in users.items():
        lines += [
            "",
            f"    # The plugin {name}: its own requests, and the answers to them. It connects with the inbox prefix",
            f"    # {user.inbox_prefix}",
            *_user(
                user,
                publish=[f"{prefix}.{name}.{operation}" for prefix in prefixes for operation in OPERATIONS],
                subscribe=[f"{user.inbox_prefix}.>"],
            ),
        ]
    lines += ["  ]", "}", ""]
    return "\n".join(lines)


def _user(user: User, *, publish: Iterable[str], subscribe: Iterable[str]) -> list[str]:
    def allow(subjects: Iterable[str]) -> list[str]:
        return [f'            "{subject}"' for subject in subjects]

    return [
        "    {",
        f'      user: "{user.name}"',
        f'      password: "{user.password}"',
        "      permissions: {",
        "        publish: {",
        "          allow: [",
        *allow(publish),
        "          ]",
        "        }",
        "        subscribe: {",
        "          allow: [",
        *allow(subscribe),
        "          ]",
        "        }",
        "      }",
        "    }",
    ]


def _inbox(user: str) -> str:
    # A subject's parts match as a whole or not at all: _INBOX_a.> is not _INBOX_a-b.x, and _INBOX_*.> is nobody's.
    return f"_INBOX_{user}"


def _prefixes(prefixes: Sequence[str]) -> list[str]:
    if isinstance(prefixes, str) or not prefixes:
        raise InvalidArgument("prefixes must be a sequence of at least one prefix")
    for prefix in prefixes:
        if _PREFIX.fullmatch(prefix) is None:
            raise InvalidArgument(
                f"a prefix is parts of A-Z a-z 0-9 _ - joined by dots, and begins with a letter or digit: {prefix!r}"
            )
    for prefix in prefixes:
        for other in prefixes:
            if other.startswith(f"{prefix}."):
                raise InvalidArgument(f"the prefix {other!r} is inside {prefix!r}: its requests would arrive twice")
    return _unlike(prefixes, "prefix")


def _unlike(names: Sequence[str], what: str) -> list[str]:
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise InvalidArgument(f"{what} named twice: {', '.join(twice)}")
    return list(names)


def _password(given: dict[str, str], user: str) -> str:
    password = given.pop(user, None)
    if password is None:
        return secrets.token_hex(_PASSWORD_BYTES)  # no character that a shell or an option would trip over
    if _PASSWORD.fullmatch(password) is None:
        raise InvalidArgument(
            f"the password of {user} must be printable ASCII characters, without spaces, quotes and backslashes"
        )
    return password


def _create(target: Path, text: str) -> None:
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except BaseException:
            # nats-server takes some files that were cut short, and then lets everybody in.
            target.unlink()
            raise


def _replace(target: Path, text: str) -> None:
    # Whole or not at all, and never for a moment readable by others, whatever mode the old file had.
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    _create(draft, text)
    try:
        draft.replace(target)
    except BaseException:
        draft.unlink()
        raise
