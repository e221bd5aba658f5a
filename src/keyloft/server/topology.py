"""How a nats-server is connected to others, and the configuration for it: a cluster, leaf nodes, a system account.

Every node of a cluster needs the same users with the same passwords: a node checks the clients that connect to it, and
trusts what other nodes send. A leaf node is trusted only with what its own user at the hub may do: the requests of the
plugins and tenants that live there, and the replies to them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from msgspec import Struct

from keyloft.core.addresses import read_address
from keyloft.errors import InvalidArgument

ROUTE: Final = "ROUTE"
"""The user as which the nodes of a cluster log in to each other; no client can log in as this user."""
SYSTEM: Final = "SYSTEM"
"""The user of the system account, which sees the servers and connections, and no data."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*", re.ASCII)


class Topology(Struct, frozen=True, kw_only=True):
    """A node among others; without arguments, a server on its own."""

    server_name: str | None = None
    cluster: str | None = None
    """The name of the cluster, the same on each node."""
    cluster_listen: str | None = None
    """Where this node listens for others, as host:port."""
    routes: Sequence[str] = ()
    """Where other nodes of the cluster listen; one of them is enough, because nodes announce each other."""
    leaf_listen: str | None = None
    """Where this node listens for leaf nodes."""
    leaves: Mapping[str, Sequence[str]] = {}
    """By the name of a leaf node, the users that connect to it: plugins, and tenants as TENANT-…."""
    leaf_of: Sequence[str] = ()
    """If this is a leaf node: where its servers listen for leaf nodes."""
    leaf_name: str | None = None
    """If this is a leaf node: its name at those servers."""
    system: bool = False
    """Whether there is a user of the system account."""

    def check(self, users: Iterable[str]) -> None:
        """Refuse arguments that don't fit together.

        Args:
            users: The plugins and tenants of the configuration.

        Raises:
            InvalidArgument: An argument is missing or wrong; the message names it.
        """
        known = set(users)
        names = {"server_name": self.server_name, "cluster": self.cluster, "leaf_name": self.leaf_name}
        for argument, name in (*names.items(), *[("leaves", leaf) for leaf in self.leaves]):
            if name is not None and _NAME.fullmatch(name) is None:
                raise InvalidArgument(f"{argument}: expected A-Z a-z 0-9 _ -, got {name!r}")
        if self.cluster is None and (self.cluster_listen is not None or self.routes):
            raise InvalidArgument("cluster: expected the name of the cluster that this node belongs to")
        if self.cluster is not None and self.cluster_listen is None:
            raise InvalidArgument("cluster_listen: expected where this node listens for others of the cluster")
        if self.leaf_name is not None and not self.leaf_of:
            raise InvalidArgument("leaf_of: expected where a server listens for this leaf node")
        if self.leaf_of and self.leaf_name is None:
            raise InvalidArgument("leaf_name: expected the name that this leaf node has at its server")
        if self.leaves and self.leaf_listen is None:
            raise InvalidArgument("leaf_listen: expected where it listens for the leaf nodes that are named")
        if self.leaf_of and (self.leaves or self.cluster is not None):
            raise InvalidArgument("leaf_of: a leaf node has no leaf nodes and no cluster of its own")
        for leaf, there in self.leaves.items():
            if not there:
                raise InvalidArgument(f"leaves: expected the plugins or tenants of {leaf}, got none")
            if unknown := [name for name in there if name not in known]:
                hint = "a tenant is written TENANT-name"
                raise InvalidArgument(f"leaves: {leaf}={unknown[0]}: there is no plugin or tenant {unknown[0]}; {hint}")
        for argument, addresses in {
            "cluster_listen": [self.cluster_listen],
            "routes": self.routes,
            "leaf_listen": [self.leaf_listen],
            "leaf_of": self.leaf_of,
        }.items():
            for address in addresses:
                if address is not None:
                    read_address(address, "127.0.0.1:6222", argument)

    @property
    def users(self) -> list[str]:
        """The users that this topology needs besides those of plugins, tenants, service and operator."""
        leaves = [*self.leaves, *([self.leaf_name] if self.leaf_name else [])]
        return [*([ROUTE] if self.cluster else []), *([SYSTEM] if self.system else []), *map(leaf_user, leaves)]

    def text(self, passwords: Mapping[str, str]) -> list[str]:
        """The lines of the configuration.

        Args:
            passwords: By user.

        Raises:
            InvalidArgument: A password that this server must send is a hash.
        """
        lines: list[str] = []
        if self.server_name is not None:
            lines += ["", f'server_name: "{self.server_name}"']
        if self.system:
            lines += [
                "",
                "# The system account: sees servers and connections, and no data.",
                "accounts: { $SYS: { users: [ {",
                f'  user: "{SYSTEM}"',
                f'  password: "{passwords[SYSTEM]}"',
                "} ] } }",
            ]
        if self.cluster is not None:
            routes = [f'    "{_url("nats", ROUTE, passwords, route)}"' for route in self.routes]
            lines += [
                "",
                "# The nodes of a cluster need the same users: write this file with --users-of for each of the others.",
                "cluster: {",
                f'  name: "{self.cluster}"',
                f'  listen: "{self.cluster_listen}"',
                "  authorization: {",
                f'    user: "{ROUTE}"',
                f'    password: "{passwords[ROUTE]}"',
                "  }",
                "  routes: [",
                *routes,
                "  ]",
                "}",
            ]
        if self.leaf_listen is not None:
            lines += ["", f'leafnodes: {{ listen: "{self.leaf_listen}" }}']
        if self.leaf_name is not None:
            urls = ", ".join(
                [f'"{_url("nats-leaf", leaf_user(self.leaf_name), passwords, hub)}"' for hub in self.leaf_of]
            )
            lines += [
                "",
                "# The service and the operator connect to the hub, which checks again what this leaf may send there.",
                f"leafnodes: {{ remotes: [ {{ urls: [{urls}] }} ] }}",
            ]
        return lines


def leaf_user(leaf: str) -> str:
    """The user as which a leaf node logs in at its hub."""
    return f"LEAF-{leaf}"


def _url(scheme: str, user: str, passwords: Mapping[str, str], address: str) -> str:
    if passwords[user].startswith("$2"):
        raise InvalidArgument(
            f"passwords: expected a plain password for {user}, got a hash, with which this server can't log in"
        )
    return f"{scheme}://{user}:{quote(passwords[user], safe='')}@{address}"
