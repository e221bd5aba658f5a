"""The command `nats-config`: writes a NATS configuration that keeps plugins and tenants apart."""

import sys
from pathlib import Path
from typing import Annotated, Final

from keyloft.cli.options import Commands, Settings, flag, option
from keyloft.cli.terminal import remark, say
from keyloft.errors import InvalidArgument


class Subjects(Settings, frozen=True, kw_only=True):
    """What the subjects of the services begin with."""

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
    subjects: Subjects,
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
    if replace and output is None:
        raise InvalidArgument("--replace needs --output: the file that is to be replaced")
    users = {isolation.SERVICE, isolation.ADMIN, *plugins, *map(tenant_user, tenants)}
    in_use = read_logins(output, "--output") if replace and output and Path(output).exists() else {}
    settings = subjects.config()
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
