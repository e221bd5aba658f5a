"""Puts all commands together: their names, and their exit codes."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
import typer.core
import typer.main

import keyloft
from keyloft.cli import (
    asyncapi,
    backup,
    changes,
    check,
    compact,
    migrate,
    nats_config,
    open_page,
    plugin,
    semantic,
    serve,
    stats,
    token,
    transfer,
    tuples,
)
from keyloft.cli.dead_letters import COMMANDS as DEAD_LETTERS
from keyloft.cli.doctor import command as doctor
from keyloft.cli.options import Commands, as_typed, call, parameters
from keyloft.cli.terminal import CommandFailed, say
from keyloft.cli.wrong_calls import Command, Group
from keyloft.core.files import OUT_OF_SPACE
from keyloft.errors import InvalidInput
from keyloft.server.error_output import print_error, report

_ARGUMENT: Final = re.compile(
    r'\bexisting="(keep|replace)"|\b(replace|resume)=True|\b(database|prefix|plugin|project|name)=(?=\W)'
)


def _with_options(message: str) -> str:
    """A message that names options (--force) instead of arguments of `keyloft.admin`."""
    return _ARGUMENT.sub(lambda found: f"--{found[found.lastindex or 0]}", message.replace("overwrite=True", "--force"))


def _discard_output() -> None:
    """Write no more to standard output: Python would do so when it ends, and report that it can't."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _as_command(work: Callable[..., int | None]) -> Callable[..., None]:
    """A command as Typer takes it, with all its options: prints errors, and ends with an exit code."""

    @functools.wraps(work)
    def run(**given: Any) -> None:
        try:
            code = call(work, given) or 0
            sys.stdout.flush()
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            code = 130
        except BrokenPipeError:
            _discard_output()  # that a reader closes the pipe is not an error
            code = 0
        except CommandFailed as error:
            print_error(as_typed(str(error), declared))
            code = 1
        except Exception as error:
            if isinstance(error, InvalidInput):
                error.args = (as_typed(str(error), declared),)
            if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
                _discard_output()
            code = report(error, _with_options)
        raise typer.Exit(code)

    declared = list(parameters(work))
    run.__signature__ = inspect.Signature(declared)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in declared}
    return run


def _group(commands: Commands, **options: Any) -> typer.Typer:
    group = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, **options)
    for command in commands:
        group.command(command.__name__.rstrip("_").replace("_", "-"), cls=Command)(_as_command(command))
    return group


_MODULES: Final = (
    serve,
    open_page,
    nats_config,
    asyncapi,
    tuples,
    stats,
    changes,
    transfer,
    backup,
    compact,
    check,
    migrate,
    doctor,
)
app = _group(
    tuple([command for module in _MODULES for command in module.COMMANDS]),
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)
app.add_typer(
    _group(
        plugin.COMMANDS,
        help="Read and write what a plugin stores, over NATS.\n\nExample: keyloft plugin get trivia score",
    ),
    name="plugin",
)
workflows = _group(
    semantic.COMMANDS,
    help="Read and change the state of workflows. In a database, or with --nats over NATS.\n\n"
    "Example: keyloft semantic list tenant/acme/project/web",
)
given_up = _group(
    DEAD_LETTERS,
    help="Writes that were given up: list, retry or drop them.\n\n"
    "Example: keyloft semantic dead-letters list tenant/acme/project/web",
)
workflows.add_typer(given_up, name="dead-letters")
app.add_typer(workflows, name="semantic")
app.add_typer(
    _group(
        token.COMMANDS,
        help="Tokens for the HTTP API.\n\nExample: keyloft token new ci --scope read:kv/users",
    ),
    name="token",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"keyloft {keyloft.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """A key-value store with several interfaces.

    get, list, keys, count, watch, set, delete and touch are about the tuple store, which programs open with
    `keyloft.open`; `plugin` is about what plugins store, `semantic` about the state of workflows. stats, changes,
    export, import, copy, backup, restore, compact, check and migrate are about all of a database. `keyloft COMMAND
    --help` explains a command.

    Example: keyloft doctor
    """


all_commands: Final = typer.main.get_command(app)
"""The whole command line, made once: each call of `app` would make it again, and take longer than most commands."""
