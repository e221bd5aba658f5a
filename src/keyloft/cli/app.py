"""All commands, put together."""

from typing import Annotated

import typer

import keyloft
from keyloft.cli import backup, check, compact, migrate, nats_config, plugin, semantic, serve, stats, transfer, tuples
from keyloft.cli.doctor import command as doctor
from keyloft.cli.options import Group
from keyloft.cli.terminal import say

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
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
    `keyloft.open`; `plugin` is about what plugins store, `semantic` about the state of workflows. stats, export,
    import, copy, backup, restore, compact, check and migrate are about all of a database. `keyloft COMMAND --help`
    explains a command.

    Example: keyloft doctor
    """


for group in (serve, nats_config, tuples, stats, plugin, semantic, transfer, backup, compact, check, migrate, doctor):
    group.add_to(app)
