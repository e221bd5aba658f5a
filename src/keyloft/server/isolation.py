"""Writes the configuration of a nats-server that keeps plugins and tenants apart.

Without it, every client can send requests in the name of any plugin or tenant. With it, each plugin and tenant has a
user, and the server refuses that user all subjects but its own, and all inboxes but its own:

    user           publishes to                                       subscribes to   (for every prefix)
    trivia         db.kv.trivia.{set,get,delete,list,…}               _INBOX_trivia.>, db.kv.trivia.events.*
    TENANT-acme    db.semantic.acme.*.{put,get,delete,list,batch,…}   _INBOX_TENANT-acme.>, db.semantic.acme.*.events.*
    SERVICE        the inboxes, $SRV.INFO, db.kv.*.events.*,          db.kv.>, db.semantic.>, both in a queue group;
                   db.semantic.*.*.events.*                           $SRV.>; _INBOX_SERVICE.>
    ADMIN          db.kv.>, db.semantic.>, $SRV.>                     _INBOX.>, db.kv.>, db.semantic.>, $SRV.>

A plugin connects with its inbox prefix: `nats.connect(url, **isolation.plugins["trivia"].options())`. No plugin can
have a name in capitals.

What the configuration can't prevent: a user may name another user's inbox as the reply subject of its own request,
because the server does not check reply subjects. Only a client that waits on that very subject receives such a reply,
and clients make up reply subjects that are too random to guess.
"""

import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from keyloft import limits
from keyloft.core.addresses import read_address
from keyloft.errors import CannotOpen, InvalidArgument
from keyloft.nats.events import EVENTS
from keyloft.plugins import rules
from keyloft.semantic import keys
from keyloft.server.topology import Topology, leaf_user

SERVICE: Final = "SERVICE"
ADMIN: Final = "ADMIN"
INFO: Final = "$SRV.INFO"
"""Where a starting service asks the others for the ids of their stores."""

# The first part can't be one that NATS uses itself, such as $SYS or _INBOX_trivia.
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*", re.ASCII)
# The characters that need no escape between quotes of the configuration.
_PASSWORD: Final = re.compile(r"[!#-&(-\[\]-~]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class NatsUser:
    """How one user connects; `repr` hides the password."""

    name: str
    password: str = field(repr=False)
    inbox_prefix: str

    def options(self) -> dict[str, Any]:
        """The options of `nats.connect`, besides the address."""
        return {"user": self.name, "password": self.password, "inbox_prefix": self.inbox_prefix}


@dataclass(frozen=True, slots=True)
class Isolation:
    """A configuration of nats-server, and its users."""

    text: str = field(repr=False)
    plugins: Mapping[str, NatsUser]
    tenants: Mapping[str, NatsUser]
    service: NatsUser
    admin: NatsUser
    others: Mapping[str, NatsUser]
    """Users of a topology: `ROUTE`, `SYSTEM`, `LEAF-…`."""

    def write(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Write the configuration to a file that only its owner can read.

        Raises:
            InvalidArgument: The file exists and `replace` is false, or it can't be written.
        """
        from keyloft.admin.files import give_name, unfinished_file  # here, since a service never writes one

        target = Path(path)
        if not replace and os.path.lexists(target):
            raise InvalidArgument(f"{target} exists already, and its passwords may be in use")
        try:
            # Complete or not at all: nats-server accepts some truncated files, and then lets every client in.
            with unfinished_file(target, overwrite=replace) as file:
                file.write_text(self.text, encoding="utf-8")
                give_name(file, target, overwrite=replace)
        except CannotOpen as error:
            raise InvalidArgument(str(error)) from error
        except OSError as error:
            raise InvalidArgument(f"{target} can't be written: {error.strerror}") from error


def isolate(
    plugins: Iterable[str],
    tenants: Iterable[str] = (),
    *,
    prefixes: Sequence[str] = rules.PREFIXES,
    semantic_prefix: str = keys.PREFIX,
    passwords: Mapping[str, str] | None = None,
    listen: str = "127.0.0.1:4222",
    topology: Topology | None = None,
) -> Isolation:
    """Make the configuration for some plugins and tenants.

    Args:
        plugins: The names of the plugins.
        tenants: The ids of the tenants of the semantic store.
        prefixes: The beginnings of the subjects of the plugins' storage.
        semantic_prefix: The beginning of the subjects of the semantic store.
        passwords: By user: a plugin's name, `TENANT-…`, `SERVICE` or `ADMIN`. Each is plain, or a bcrypt hash as
            nats-server takes them. Other users get random passwords. To add a user to a configuration in use, pass
            the passwords in use.
        listen: Where the server listens, as host:port.
        topology: How the server is connected to others: a cluster, leaf nodes, a system account.

    Raises:
        InvalidPluginName: No plugin can have this name.
        InvalidKey: No tenant can have this id.
        InvalidArgument: A plugin or tenant is named twice; or a prefix, password, address or topology can't be used.
    """
    if isinstance(plugins, str) or isinstance(tenants, str):
        raise InvalidArgument("plugins, tenants: expected a sequence of names, got a string")
    names = _unlike([rules.plugin_name(name) for name in plugins], "plugin")
    ids = _unlike([keys.check_id(tenant, "tenant") for tenant in tenants], "tenant")
    if isinstance(prefixes, str) or not prefixes:
        raise InvalidArgument("prefixes: expected a sequence of at least one prefix")
    *spaces, semantic = _prefixes([*prefixes, semantic_prefix])
    read_address(listen, "127.0.0.1:4222", "listen")
    topology = topology or Topology()
    topology.check([*names, *map(keys.tenant_user, ids)])
    given = dict(passwords or {})

    def user(name: str) -> NatsUser:
        # NATS compares whole parts of subjects: _INBOX_a.> does not match _INBOX_a-b.x, and _INBOX_*.> matches neither.
        # ADMIN has every client's default prefix, so that operators' tools need no option.
        return NatsUser(name, _password(given, name), "_INBOX" if name == ADMIN else f"_INBOX_{name}")

    isolation = Isolation(
        "",
        plugins={name: user(name) for name in names},
        tenants={tenant: user(keys.tenant_user(tenant)) for tenant in ids},
        service=user(SERVICE),
        admin=user(ADMIN),
        others={name: user(name) for name in topology.users},
    )
    if given:
        raise InvalidArgument(
            f"passwords: expected names of users, got some that are not: {', '.join(sorted(map(repr, given)))}"
        )
    return replace(isolation, text=_text(isolation, spaces, semantic, listen, topology))


def logins_in(text: str) -> dict[str, str]:
    """The users of a configuration that `isolate` made, and their passwords."""
    sent = {user: unquote(password) for user, password in re.findall(r'"nats-leaf://([^:"]+):([^@"]+)@', text)}
    return sent | dict(re.findall(r'^ *user: "([^"]+)"\n *password: "([^"]+)"$', text, re.MULTILINE))


def _text(isolation: Isolation, prefixes: Sequence[str], semantic: str, listen: str, topology: Topology) -> str:
    service, admin = isolation.service, isolation.admin
    confined = [*isolation.plugins.values(), *isolation.tenants.values()]
    requests = [f"{prefix}.>" for prefix in (*prefixes, semantic)]
    lines = [
        "# A NATS server on which plugins and tenants can't reach each other's data. Start it: nats-server -c FILE",
        "# This file holds passwords: only the user that runs the server should be able to read it.",
        "",
        f'listen: "{listen}"',
        "",
        "# A connection for which more than max_pending waits is cut off. From three quarters of it on, senders are",
        "# slowed down, so that a burst does not get a service cut off.",
        f"max_pending: {limits.NATS_PENDING_BYTES}",
        *topology.text({name: user.password for name, user in isolation.others.items()}),
        "",
        "# There is no user without a password: clients that don't log in are refused.",
        "authorization {",
        "  users: [",
    ]
    if topology.leaf_name is None:
        replies = map(_replies, (*confined, admin, service))
        events = [*[f"{prefix}.*.{EVENTS}.*" for prefix in prefixes], f"{semantic}.*.*.{EVENTS}.*"]
        lines += [
            "    # The service. It receives all requests, and only in a queue group, so that each is carried out once.",
            "    # It publishes to inboxes, and events to watchers, and asks other services for their stores.",
            "    # allow_responses would let it publish to any subject that a request names as its reply subject,",
            "    # another plugin's «set» included.",
            *_user(service, [*replies, *events, INFO], [*[f"{one} >" for one in requests], "$SRV.>"]),
            "",
            "    # The operator: all data, and the state of the services.",
            *_user(admin, [*requests, "$SRV.>"], [*requests, "$SRV.>"]),
        ]
    events_of = {name: [f"{prefix}.{name}.{EVENTS}.*" for prefix in prefixes] for name in isolation.plugins}
    events_of |= {user.name: [f"{semantic}.{tenant}.*.{EVENTS}.*"] for tenant, user in isolation.tenants.items()}
    for name, user in isolation.plugins.items():
        comment = f"The plugin {name}: its requests, replies and events; its inbox prefix is {user.inbox_prefix}"
        subjects = [f"{prefix}.{name}.{operation}" for prefix in prefixes for operation in rules.OPERATIONS]
        lines += ["", f"    # {comment}", *_user(user, subjects, events_of[name])]
    for tenant, user in isolation.tenants.items():
        comment = f"The tenant {tenant}: its requests, replies and events; its inbox prefix is {user.inbox_prefix}"
        subjects = [f"{semantic}.{tenant}.*.{operation}" for operation in keys.OPERATIONS]
        lines += ["", f"    # {comment}", *_user(user, subjects, events_of[user.name])]
    inboxes = {user.name: _replies(user) for user in confined}
    # All subjects of an owner, not one per operation: nats-server does not pass a subscription to db.semantic.> on to a
    # leaf node that may only publish to db.semantic.acme.*.put.
    spaces = {name: [f"{prefix}.{name}.>" for prefix in prefixes] for name in isolation.plugins}
    spaces |= {user.name: [f"{semantic}.{tenant}.>"] for tenant, user in isolation.tenants.items()}
    for leaf, there in topology.leaves.items():
        lines += [
            "",
            f"    # The leaf node {leaf}: the requests of {', '.join(there)}, the replies to them, and their events",
            *_user(
                isolation.others[leaf_user(leaf)],
                [space for name in there for space in spaces[name]],
                [subject for name in there for subject in (inboxes[name], *events_of[name])],
            ),
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _replies(user: NatsUser) -> str:
    """The subjects of the replies to a user."""
    return f"{user.inbox_prefix}.>"


def _user(user: NatsUser, publish: Iterable[str], subscribe: Iterable[str] = ()) -> list[str]:
    """A user that may publish to these subjects, and subscribe to its replies and to these."""

    def allow(action: str, subjects: Iterable[str]) -> list[str]:
        quoted = [f'            "{subject}"' for subject in subjects]
        return [f"        {action}: {{", "          allow: [", *quoted, "          ]", "        }"]

    return [
        "    {",
        f'      user: "{user.name}"',
        f'      password: "{user.password}"',
        "      permissions: {",
        *allow("publish", publish),
        *allow("subscribe", [_replies(user), *subscribe]),
        "      }",
        "    }",
    ]


def _prefixes(prefixes: Sequence[str]) -> list[str]:
    for prefix in prefixes:
        if _PREFIX.fullmatch(prefix) is None:
            raise InvalidArgument(
                "expected a prefix such as db.kv: A-Z a-z 0-9 _ -, a letter or digit first, dots between the parts; "
                f"got {prefix!r}"
            )
        if inside := [other for other in prefixes if other.startswith(f"{prefix}.")]:
            raise InvalidArgument(f"the prefix {inside[0]!r} is inside {prefix!r}: its requests would arrive twice")
    return _unlike(prefixes, "prefix")


def _unlike(names: Sequence[str], what: str) -> list[str]:
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise InvalidArgument(f"{what} named twice: {', '.join(twice)}")
    return list(names)


def _password(given: dict[str, str], user: str) -> str:
    password = given.pop(user, None)
    if password is None:
        return secrets.token_hex(limits.NATS_PASSWORD_BYTES)  # hex, which needs no quotes in a shell
    if _PASSWORD.fullmatch(password) is None:
        raise InvalidArgument(f"passwords: expected printable ASCII without spaces, quotes and backslashes for {user}")
    return password
