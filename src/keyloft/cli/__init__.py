"""The command `keyloft`: its sub-commands, what they print, and their exit codes.

0: done. 1: it failed, or there is no such key. 2: it was called in a wrong way. Results go to the standard output as
JSON, whatever else there is to say to the standard error output. What a command needs is imported when it is called, so
that `keyloft --help` is quick.
"""

import argparse
import asyncio
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import keyloft
from keyloft.errors import DatabaseError, InvalidArgument, InvalidInput, KeyloftError, Unanswered, Undecodable

if TYPE_CHECKING:
    from keyloft.bus import Login
    from keyloft.plugins import DatabaseClient
    from keyloft.server.config import Config


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process."""
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    try:
        asked = _parser(arguments).parse_args(arguments)
        work: Callable[[argparse.Namespace], int] = asked.work
        return work(asked)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("KEYLOFT_DEBUG"):
            raise
        _complain(_told(error))
        return 2 if isinstance(error, InvalidInput) else 1


def _told(error: Exception) -> str:
    match error:
        case InvalidInput():
            return str(error)
        case KeyloftError():
            return f"{error.code}: {error}"
        case ModuleNotFoundError():
            return f'{error.name} is not installed: pip install "keyloft[all]" brings everything'
        case OSError():
            return str(error)
    return f"failed unexpectedly: {type(error).__name__}: {error}\nKEYLOFT_DEBUG=1 shows where"


def _say(text: str) -> None:
    """Print a result."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has seen enough; Python would complain about it once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(text: str) -> None:
    sys.stderr.write(f"keyloft: {text}\n")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="keyloft", description="A key-value store with several faces.")
    parser.add_argument("--version", action="version", version=f"keyloft {keyloft.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about, prepare in (
        ("serve", "run the storage services for plugins and workflows", _prepare_serve),
        ("plugin", "read and write what a plugin stores, over NATS", _prepare_plugin),
        ("nats-config", "write a NATS configuration that keeps plugins and tenants apart", _prepare_nats_config),
        ("migrate", "bring the schema of a database to another version", _prepare_migrate),
    ):
        command = _add_command(commands, name, about)
        if name in arguments[:1]:
            prepare(command)
    return parser


def _add_command(commands: Any, name: str, about: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return command


def _add_settings(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Flags for settings, which `config.load` reads."""
    from keyloft.server.config import SETTINGS

    group = parser.add_argument_group("settings")
    group.add_argument("--config", metavar="FILE", help="A TOML file with settings. [KEYLOFT_CONFIG; default: none]")
    for name in names:
        setting = SETTINGS[name]
        default = ",".join(setting.default) if setting.is_list else setting.default
        known = "none" if default in (None, "") else f"{default:g}" if isinstance(default, float) else default
        group.add_argument(
            setting.flag,
            metavar="|".join(setting.choices) or setting.metavar,
            help=f"{setting.description} [{setting.environment}; default: {known}]".replace("%", "%%"),
        )


# keyloft serve


def _prepare_serve(parser: argparse.ArgumentParser) -> None:
    from keyloft.server.config import SETTINGS

    parser.description = """\
Run the storage services for plugins and workflows, until Ctrl-C or SIGTERM.

A setting comes from its flag, else from the environment, else from the file of
--config, else it has its default. In that file --log-level is called log_level."""
    _add_settings(parser, SETTINGS)
    parser.set_defaults(work=_serve)


def _serve(asked: argparse.Namespace) -> int:
    from keyloft.server import app, config

    settings = config.load(vars(asked))
    config.check_service(settings)
    app.run(settings)
    return 0


# keyloft plugin

_ABSENT: Final = object()


def _prepare_plugin(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about, act in (
        ("get", "print the value at a key as JSON; exit code 1 if there is none", _get),
        ("set", "store a value, and print it as it was understood", _set),
        ("delete", "remove a key; exit code 1 if there was none", _delete),
        ("list", "print the keys as a JSON array", _list),
    ):
        command = _add_command(commands, name, about)
        command.add_argument("plugin", metavar="PLUGIN", help="Whose storage.")
        if name == "list":
            command.add_argument("--prefix", default="", metavar="TEXT", help="Only keys that begin with this text.")
            command.add_argument("--limit", type=int, metavar="N", help="At most so many keys.")
        else:
            command.add_argument("key", metavar="KEY")
        if name == "set":
            command.add_argument(
                "value",
                metavar="VALUE",
                help="JSON, as in 100 or '{\"a\": 1}'; whatever is not JSON is text. - reads it.",
            )
            command.add_argument("--text", action="store_true", help="VALUE is text, even if it could be JSON.")
            command.add_argument("--ttl", type=int, metavar="SECONDS", help="After so many seconds it is gone.")
        _prepare_client(command)
        command.set_defaults(work=_plugin, act=act)


def _prepare_client(parser: argparse.ArgumentParser) -> None:
    from keyloft.plugins.client import PREFIX
    from keyloft.server.config import NATS_SETTINGS

    parser.add_argument(
        "--subjects", default=PREFIX, metavar="PREFIX", help=f"The subjects of the service. [default: {PREFIX}]"
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="How long to wait for an answer. [default: 5]"
    )
    _add_settings(parser, NATS_SETTINGS)


def _plugin(asked: argparse.Namespace) -> int:
    from keyloft.server import config

    settings = config.load(vars(asked), only=config.NATS_SETTINGS)
    if not 0 < asked.timeout <= 3600:
        raise InvalidArgument("--timeout: a number of seconds above 0, and 3600 at most")
    # What NATS says by the way reaches the user as the error of the request.
    logging.getLogger("keyloft").addHandler(logging.NullHandler())
    try:
        return asyncio.run(_act(asked, settings))
    except KeyloftError as error:
        # A program that calls us can go by the code, which is the same whoever refused the request.
        _complain(f"{error.code}: {error}")
        return 1


async def _act(asked: argparse.Namespace, settings: "Config") -> int:
    from keyloft.plugins import DatabaseClient
    from keyloft.server.config import DEFAULT_NATS_PORT

    addresses = list(settings.nats) or [f"nats://127.0.0.1:{DEFAULT_NATS_PORT}"]
    await _check_somebody_listens(addresses, asked.timeout)
    client = await DatabaseClient.connect(
        addresses,
        plugin_name=asked.plugin,
        login=settings.login(),
        prefix=asked.subjects,
        timeout=asked.timeout,
        **_inbox(settings.login(), addresses),
    )
    act: Callable[[DatabaseClient, argparse.Namespace], Any] = asked.act
    async with client:
        return int(await act(client, asked))


def _inbox(login: "Login", addresses: list[str]) -> dict[str, str]:
    """A user that may reach all plugins' storage does not receive its answers where a plugin does."""
    from urllib.parse import urlsplit

    from keyloft.server.isolation import ADMIN

    users = {login.user, *[urlsplit(address).username for address in addresses]}
    return {"inbox_prefix": "_INBOX"} if ADMIN in users else {}


async def _check_somebody_listens(addresses: list[str], seconds: float) -> None:
    """A client would patiently wait for a server to come up; somebody at a terminal wants to know at once."""
    from urllib.parse import urlsplit

    from keyloft.server.config import DEFAULT_NATS_PORT
    from keyloft.urls import without_password

    for address in addresses:
        parts = urlsplit(address if "://" in address else f"nats://{address}")
        try:
            async with asyncio.timeout(seconds):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or DEFAULT_NATS_PORT)
        except (OSError, TimeoutError, ValueError):
            continue
        writer.transport.abort()
        return
    raise Unanswered(
        f"no NATS server answers at {', '.join(map(without_password, addresses))}: "
        "start one with `keyloft serve`, or name another with --nats"
    )


async def _get(client: "DatabaseClient", asked: argparse.Namespace) -> int:
    value = await client.kv.get(asked.key, default=_ABSENT)
    if value is _ABSENT:
        _complain(f"{asked.plugin} has no key {asked.key!r}")
        return 1
    _say(_json(value))
    return 0


async def _set(client: "DatabaseClient", asked: argparse.Namespace) -> int:
    text = sys.stdin.read() if asked.value == "-" else asked.value
    value = text if asked.text else _understood(text)
    await client.kv.set(asked.key, value, ttl=asked.ttl)
    _say(_json(value))
    return 0


async def _delete(client: "DatabaseClient", asked: argparse.Namespace) -> int:
    existed = await client.kv.delete(asked.key)
    _say(_json(existed))
    return 0 if existed else 1


async def _list(client: "DatabaseClient", asked: argparse.Namespace) -> int:
    _say(_json(await client.kv.list(asked.prefix, limit=asked.limit)))
    return 0


def _understood(text: str) -> Any:
    from keyloft.values import decode_json

    try:
        return decode_json(text.encode())
    except (Undecodable, UnicodeEncodeError):
        return text


def _json(value: object) -> str:
    from keyloft import limits
    from keyloft.values import encode_json

    return encode_json(value, limits.LARGEST_VALUE_BYTES).decode()


# keyloft nats-config


def _prepare_nats_config(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Write a configuration of nats-server with a user and a password for each plugin
and tenant, that lets it reach its own storage and nobody else's; and users for
the service (SERVICE) and the operator (ADMIN)."""
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="NAME", help="A plugin; to be repeated for each."
    )
    parser.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="ID",
        help="A tenant of the semantic store; to be repeated for each. It logs in as TENANT-ID.",
    )
    parser.add_argument("--output", metavar="FILE", help="Where to write it. [default: the standard output]")
    parser.add_argument(
        "--replace", action="store_true", help="FILE may exist already; users that it knows keep their passwords."
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:4222", metavar="HOST:PORT", help="Where it listens. [default: 127.0.0.1:4222]"
    )
    _add_settings(parser, ["prefixes", "semantic_prefix"])
    parser.set_defaults(work=_nats_config)


def _nats_config(asked: argparse.Namespace) -> int:
    from keyloft.semantic.naming import tenant_user
    from keyloft.server import config, isolation

    if not asked.plugin and not asked.tenant:
        raise InvalidArgument("name at least one --plugin or --tenant")
    tenants = [tenant_user(tenant) for tenant in asked.tenant]
    users = {isolation.SERVICE, isolation.ADMIN, *asked.plugin, *tenants}
    gone = _users_in_use(asked.output) - users if asked.replace else set()
    settings = config.load(vars(asked), only=["prefixes", "semantic_prefix"])
    made = isolation.isolate(
        asked.plugin,
        asked.tenant,
        prefixes=settings.prefixes,
        semantic_prefix=settings.semantic_prefix,
        passwords=_passwords_in_use(asked.output, users) if asked.replace else None,
        listen=asked.listen,
    )
    file = asked.output or "FILE"
    if asked.output is None:
        _say(made.text.rstrip("\n"))
    else:
        try:
            made.write(asked.output, replace=asked.replace)
        except InvalidArgument as error:
            hint = "" if asked.replace else "; --replace keeps those of the plugins that are named again"
            raise InvalidArgument(f"{error}{hint}") from None
    if gone:
        sys.stderr.write(f"No longer in it, because not named again: {', '.join(sorted(gone))}.\n")
    sys.stderr.write(f"""\
{"Save it as FILE, readable by you alone" if asked.output is None else f"{file} is written"}. Next:
  nats-server -c {file}
  KEYLOFT_NATS_USER={made.service.name} KEYLOFT_NATS_PASSWORD=… keyloft serve --nats nats://{asked.listen}
A plugin logs in under its own name, a tenant as TENANT-<id>; the passwords are in {file}.
""")
    return 0


def _passwords_in_use(path: str | None, users: set[str]) -> dict[str, str]:
    return {user: password for user, password in _logins(path).items() if user in users}


def _users_in_use(path: str | None) -> set[str]:
    return set(_logins(path))


def _logins(path: str | None) -> dict[str, str]:
    """The users and passwords of a configuration that was written before."""
    if path is None:
        raise InvalidArgument("--replace needs --output: the file that is to be replaced")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--output: {path} can't be read: {error}") from None
    return dict(re.findall(r'^ *user: "([^"]+)"\n *password: "([^"]+)"$', text, re.MULTILINE))


# keyloft migrate


def _prepare_migrate(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Bring the schema of a database to the version that this Keyloft reads and writes,
or back to an earlier one. Nothing else may use the database meanwhile."""
    parser.add_argument("--yes", action="store_true", help="go back although that deletes data")
    parser.add_argument(
        "--to",
        default="head",
        metavar="REVISION",
        help="head, or how far back: -1 for one step, base for a database without Keyloft. "
        "Going back deletes what the earlier schema can't hold. [default: head]",
    )
    _add_settings(parser, ["database"])
    parser.set_defaults(work=_migrate)


def _migrate(asked: argparse.Namespace) -> int:
    from keyloft import migrations
    from keyloft.server import config
    from keyloft.urls import without_password

    database = config.load(vars(asked), only=["database"]).database
    goes_back = asked.to == "base" or asked.to.startswith("-")
    if goes_back and not asked.yes:
        raise InvalidArgument(
            f"going back deletes what the earlier schema can't hold, in {without_password(database)}: "
            "stop what uses it, make a copy, then say --yes"
        )
    try:
        (migrations.downgrade if goes_back else migrations.upgrade)(database, asked.to)
    except KeyloftError:
        raise
    except Exception as error:
        if os.environ.get("KEYLOFT_DEBUG"):
            raise
        # The databases' own errors come with the whole statement: the first line says what is wrong.
        raise DatabaseError(f"the migration failed: {str(error).splitlines()[0]}") from error
    what = (
        f"went back ({asked.to})"
        if goes_back
        else "has the schema of this version"
        if asked.to == "head"
        else "went on"
    )
    sys.stderr.write(f"{without_password(database)} {what}\n")
    return 0
