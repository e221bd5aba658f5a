"""The command `nats-config`: writes a NATS configuration that keeps plugins and tenants apart."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Final

from keyloft.cli.options import Commands, Settings, flag, option
from keyloft.cli.terminal import remark, say
from keyloft.errors import InvalidArgument


class Subjects(Settings, frozen=True, kw_only=True):
    """The beginnings of the services' subjects."""

    names = ("prefixes", "semantic_prefix")


def nats_config(
    *,
    plugin: Annotated[list[str] | None, option("NAME", "A plugin; to be repeated for each.")] = None,
    tenant: Annotated[
        list[str] | None, option("ID", "A tenant, which logs in as TENANT-ID; to be repeated for each.")
    ] = None,
    output: Annotated[str | None, option("FILE", "Where to write it. [default: the standard output]")] = None,
    replace: Annotated[bool, flag("--replace", "FILE may exist; users that it knows keep their passwords.")] = False,
    listen: Annotated[str, option("HOST:PORT", "Where it listens.")] = "127.0.0.1:4222",
    users_of: Annotated[
        str | None, option("FILE", "The configuration of another node: its users have the same passwords here.")
    ] = None,
    server_name: Annotated[str | None, option("NAME", "The name of this server.")] = None,
    cluster: Annotated[str | None, option("NAME", "The name of the cluster that it is a node of.")] = None,
    cluster_listen: Annotated[str | None, option("HOST:PORT", "Where it listens for other nodes.")] = None,
    routes: Annotated[
        list[str] | None, option("HOST:PORT", "Where another node listens for it; to be repeated for each.", "--route")
    ] = None,
    leaf_listen: Annotated[str | None, option("HOST:PORT", "Where it listens for leaf nodes.")] = None,
    leaves: Annotated[
        list[str] | None,
        option("NAME=USER,…", "A leaf node, and the plugins (or TENANT-ID) on it; to be repeated for each.", "--leaf"),
    ] = None,
    leaf_of: Annotated[
        list[str] | None, option("HOST:PORT", "Where a server listens for this one, as its leaf node; may be repeated.")
    ] = None,
    leaf_name: Annotated[str | None, option("NAME", "The name that this leaf node has there.")] = None,
    system: Annotated[bool, flag("--system", "With a user of the system account, SYSTEM.")] = False,
    subjects: Subjects,
) -> None:
    """Write a NATS configuration that isolates plugins and tenants.

    It has a user and a password for each plugin and tenant, with which it reaches its own storage and no other; and
    users for the service (SERVICE) and the operator (ADMIN). For several servers, write one file each, all but the
    first with --users-of.

    Example: keyloft nats-config --plugin trivia --plugin quote-db --output nats.conf
    """
    from keyloft.semantic.keys import tenant_user
    from keyloft.server import isolation
    from keyloft.server.topology import Topology, leaf_user

    plugins, tenants = plugin or [], tenant or []
    if not plugins and not tenants:
        raise InvalidArgument("name at least one --plugin or --tenant")
    if replace and output is None:
        raise InvalidArgument("--replace needs --output: the file that is to be replaced")
    topology = Topology(
        server_name=server_name,
        cluster=cluster,
        cluster_listen=cluster_listen,
        routes=routes or (),
        leaf_listen=leaf_listen,
        leaves=dict([_leaf(one) for one in leaves or ()]),
        leaf_of=leaf_of or (),
        leaf_name=leaf_name,
        system=system,
    )
    users = {isolation.SERVICE, isolation.ADMIN, *plugins, *map(tenant_user, tenants), *topology.users}
    in_use = read_logins(output, "--output") if replace and output and Path(output).exists() else {}
    elsewhere = {} if users_of is None else read_logins(users_of, "--users-of")
    if leaf_of and leaf_name and (leaf_login := leaf_user(leaf_name)) not in in_use | elsewhere:
        expected = "the file of a server of the cluster, whose passwords this leaf needs"
        wrong = "" if users_of is None else f", got {users_of}, which has no user {leaf_login}: name the --leaf there"
        raise InvalidArgument(f"--users-of: expected {expected}{wrong}")
    settings = subjects.config()
    made = isolation.isolate(
        plugins,
        tenants,
        prefixes=settings.prefixes,
        semantic_prefix=settings.semantic_prefix,
        passwords={user: password for user, password in (in_use | elsewhere).items() if user in users},
        listen=listen,
        topology=topology,
    )
    if output is None:
        say(made.text.rstrip("\n"))
    else:
        try:
            made.write(output, replace=replace)
        except InvalidArgument as error:
            is_taken = not replace and os.path.lexists(output)
            hint = "; --replace keeps those of the users that are named again" if is_taken else ""
            raise InvalidArgument(f"{error}{hint}") from None
    if gone := set(in_use) - users:
        remark(f"No longer in it, because not named again: {', '.join(sorted(gone))}.")
    file = output or "FILE"
    sys.stdout.flush()
    # Other machines can't reach a server at 0.0.0.0, on which it listens for all of them.
    address = re.sub(r"^(0\.0\.0\.0|\[::\]):", "THIS-HOST:", listen)
    serve = f"KEYLOFT_NATS_USER={made.service.name} KEYLOFT_NATS_PASSWORD=… keyloft serve --nats nats://{address}"
    remark(f"""\
{"Save it as FILE, readable by you alone" if output is None else f"{file} is written"}. Next:
  nats-server -c {file}
  {serve if leaf_name is None else "The service connects to the server that this leaf node belongs to."}
A plugin logs in under its own name, a tenant as TENANT-<id>; the passwords are in {file}.""")


def _leaf(text: str) -> tuple[str, list[str]]:
    name, sign, users = text.partition("=")
    if not sign:
        raise InvalidArgument(f"--leaf: expected NAME=USER,… with the plugins that connect to it, got {text!r}")
    return name, [user for user in users.split(",") if user]


def read_logins(file: str, option: str) -> dict[str, str]:
    """The users of a configuration that was written before, and their passwords.

    Raises:
        InvalidArgument: The file, which this option names, can't be read.
    """
    from keyloft.server import isolation

    try:
        return isolation.logins_in(Path(file).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise InvalidArgument(f"{option}: {file} is not a text in UTF-8") from None


COMMANDS: Final[Commands] = (nats_config,)
