"""The command that brings the schema of a database to another version: `migrate`."""

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from keyloft.cli.database import NamedDatabase
from keyloft.cli.options import Commands, Output, Yes, flag, option
from keyloft.cli.terminal import confirm, remark, say, to_json

if TYPE_CHECKING:
    from keyloft.migrations import MigrationPlan


def migrate(
    *,
    yes: Yes = False,
    revision: Annotated[
        str, option("REVISION", "head, or how far back: -1 for one step, base for a database without Keyloft.", "--to")
    ] = "head",
    drop: Annotated[bool, flag("--drop", "Going back: drop the plugins' table also if it has rows.")] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Show what would be done, with its SQL, and change nothing.")] = False,
    out: Output,
    database: NamedDatabase,
) -> None:
    """Bring the schema of a database to another version.

    To the version that this Keyloft reads and writes, or back to an earlier one, which deletes what the earlier schema
    can't hold. Nothing else may use the database meanwhile.

    Example: keyloft migrate --database bot.db --dry-run
    """
    from keyloft import migrations

    url = database.url(make=True)
    goes_back = revision == "base" or revision.startswith("-")
    if not goes_back and revision != "head":
        goes_back = (migrations.current_revision(url) or "") > revision
    if dry_run:
        _show(migrations.plan(url, revision, down=goes_back), database.shown, out)
        return
    if goes_back and not yes:
        migrations.plan(url, revision, down=True)  # refuses a revision that does not exist, before anything is asked
        lost = f"Going back deletes what the earlier schema can't hold, in {database.shown}."
        confirm(f"{lost} Has everything that uses it been stopped, and a copy been made?")
    if goes_back:
        migrations.downgrade(url, revision, drop=drop)
        remark(f"{database.shown} went back ({revision})")
    else:
        migrations.upgrade(url, revision)
        schema = "the schema of this version" if revision == "head" else f"schema {migrations.current_revision(url)}"
        remark(f"{database.shown} has {schema}")
    if out.as_json:
        say(to_json({"database": database.shown, "to": revision}))


def _show(plan: "MigrationPlan", name: str, out: Output) -> None:
    if not out.is_for_people:
        steps = msgspec.to_builtins(plan.steps)
        say(to_json({"database": name, "from": plan.current, "to": plan.target, "steps": steps, "sql": plan.sql}))
        return
    if not plan.steps:
        say(f"{name} is at {plan.current or 'no revision'}: nothing would be done")
        return
    say(f"{name} would go from {plan.current or 'nothing'} to {plan.target or 'nothing'}:")
    for step in plan.steps:
        say(f"  {'undo ' if plan.is_down else ''}{step.revision}  {step.name}")
    say(f"\n{plan.sql}")


COMMANDS: Final[Commands] = (migrate,)
