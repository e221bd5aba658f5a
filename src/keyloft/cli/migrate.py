"""The command that brings the schema of a database to another version: `migrate`."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from keyloft.cli.options import AsJson, Yes, add_commands
from keyloft.cli.terminal import is_for_people, remark, say, show_json
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import DatabaseError, InvalidArgument, KeyloftError
from keyloft.server.config import Flags, load

if TYPE_CHECKING:
    from keyloft.migrations import MigrationPlan

T = TypeVar("T")


def add_to(app: typer.Typer) -> None:
    add_commands(app, ["database"], {"migrate": migrate})


def migrate(
    *,
    yes: Yes = False,
    to: Annotated[
        str,
        typer.Option(
            metavar="REVISION",
            help="head, or how far back: -1 for one step, base for a database without Keyloft. Going back deletes what "
            "the earlier schema can't hold.",
        ),
    ] = "head",
    drop: Annotated[
        bool, typer.Option("--drop", help="Going back: drop the plugins' table also if it has rows.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, with its SQL, and change nothing.")
    ] = False,
    as_json: AsJson = False,
    flags: Flags,
) -> None:
    """Bring the schema of a database to another version.

    To the version that this Keyloft reads and writes, or back to an earlier one. Nothing else may use the database
    meanwhile.

    Example: keyloft migrate --database bot.db --dry-run
    """
    from keyloft import migrations

    database = load(flags, only=["database"]).database
    goes_back = to == "base" or to.startswith("-")
    if not goes_back and to != "head":
        goes_back = (_explained(lambda: migrations.current_revision(database)) or "") > to
    if dry_run:
        _show(_explained(lambda: migrations.plan(database, to, down=goes_back)), database, as_json=as_json)
        return
    if goes_back and not yes:
        raise InvalidArgument(
            f"going back deletes what the earlier schema can't hold, in {DatabaseUrl.parse(database).shown}: "
            "stop what uses it, make a copy, then say --yes"
        )
    if goes_back:
        _explained(lambda: migrations.downgrade(database, to, drop=drop))
    else:
        _explained(lambda: migrations.upgrade(database, to))
    arrived = "the schema of this version" if to == "head" else f"schema {to}"
    what = f"went back ({to})" if goes_back else f"has {arrived}"
    remark(f"{DatabaseUrl.parse(database).shown} {what}")
    if as_json:
        show_json({"database": DatabaseUrl.parse(database).shown, "to": to}, as_json=True)


def _explained(work: Callable[[], T]) -> T:
    try:
        return work()
    except KeyloftError:
        raise
    except Exception as error:
        if os.environ.get("KEYLOFT_DEBUG"):
            raise
        # The databases' own errors come with the whole statement: the first line says what is wrong.
        raise DatabaseError(f"the migration failed: {str(error).splitlines()[0]}") from error


def _show(plan: "MigrationPlan", database: str, *, as_json: bool) -> None:
    name = DatabaseUrl.parse(database).shown
    if as_json or not is_for_people():
        steps = [{"revision": step.revision, "name": step.name} for step in plan.steps]
        show_json(
            {"database": name, "from": plan.current, "to": plan.target, "steps": steps, "sql": plan.sql}, as_json=True
        )
        return
    if not plan.steps:
        say(f"{name} is at {plan.current or 'no revision'}: nothing would be done")
        return
    say(f"{name} would go from {plan.current or 'nothing'} to {plan.target or 'nothing'}:")
    for step in plan.steps:
        say(f"  {'undo ' if plan.is_down else ''}{step.revision}  {step.name}")
    say(f"\n{plan.sql}")
