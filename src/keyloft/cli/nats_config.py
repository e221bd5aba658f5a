"""The command `nats-config`: writes a NATS configuration that keeps plugins and tenants apart."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from keyloft.cli.options import add_commands
from keyloft.cli.terminal import remark, say
from keyloft.errors import InvalidArgument
from keyloft.server.config import Flags, load


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["prefixes", "semantic_prefix"], {"nats-config": nats_config})


def nats_config(
    *,
    plugin: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A plugin; to be repeated for each.")] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="A tenant of the semantic store; to be repeated for each. It logs in as TENANT-ID."
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where to write it. [default: the standard output]")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="FILE may exist already; users that it knows keep their passwords.")
    ] = False,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where it listens.")] = "127.0.0.1:4222",
    flags: Flags,
) -> None:
    """Write a NATS configuration that keeps plugins and tenants apart.

    It has a user and a password for each plugin and tenant, with which it reaches its own storage and no other; and
    users for the service (SERVICE) and the operator (ADMIN).

    Example: keyloft nats-config --plugin trivia --plugin quote-db --output nats.conf
    """
    from keyloft.semantic.keys import tenant_user
    from keyloft.server import isolation

    plugins, tenants = plugin or [], tenant or []
    if not plugins and not tenants:
        raise InvalidArgument("name at least one --plugin or --tenant")
    users = {isolation.SERVICE, isolation.ADMIN, *plugins, *map(tenant_user, tenants)}
    in_use = _logins(output) if replace else {}
    settings = load(flags, only=["prefixes", "semantic_prefix"])
    made = isolation.isolate(
        plugins,
        tenants,
        prefixes=settings.prefixes,
        semantic_prefix=settings.semantic_prefix,
        passwords={user: password for user, password in in_use.items() if user in users},
        listen=listen,
    )
    if output is None:
        say(made.text.rstrip("\n"))
    else:
        try:
            made.write(output, replace=replace)
        except InvalidArgument as error:
            hint = "" if replace else "; --replace keeps those of the users that are named again"
            raise InvalidArgument(f"{error}{hint}") from None
    if gone := set(in_use) - users:
        remark(f"No longer in it, because not named again: {', '.join(sorted(gone))}.")
    file = output or "FILE"
    sys.stdout.flush()
    remark(f"""\
{"Save it as FILE, readable by you alone" if output is None else f"{file} is written"}. Next:
  nats-server -c {file}
  KEYLOFT_NATS_USER={made.service.name} KEYLOFT_NATS_PASSWORD=… keyloft serve --nats nats://{listen}
A plugin logs in under its own name, a tenant as TENANT-<id>; the passwords are in {file}.""")


def _logins(path: str | None) -> dict[str, str]:
    """The users and passwords of a configuration that was written before."""
    from keyloft.server import isolation

    if path is None:
        raise InvalidArgument("--replace needs --output: the file that is to be replaced")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--output: {path} can't be read: {error}") from None
    return isolation.logins_in(text)
