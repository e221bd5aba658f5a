"""The commands that keep a database in order: `migrate`."""

import os
from typing import Annotated

import typer

from keyloft.cli.options import Yes, with_settings
from keyloft.cli.terminal import remark, told
from keyloft.errors import DatabaseError, InvalidArgument, KeyloftError
from keyloft.server.config import Flags, load
from keyloft.urls import without_password


def add_to(app: typer.Typer) -> None:
    app.command("migrate")(told(with_settings("database")(migrate)))


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
    flags: Flags,
) -> int:
    """Bring the schema of a database to another version.

    To the version that this Keyloft reads and writes, or back to an earlier one. Nothing else may use the database
    meanwhile.
    """
    from keyloft import migrations

    database = load(flags, only=["database"]).database
    goes_back = to == "base" or to.startswith("-")
    if goes_back and not yes:
        raise InvalidArgument(
            f"going back deletes what the earlier schema can't hold, in {without_password(database)}: "
            "stop what uses it, make a copy, then say --yes"
        )
    try:
        (migrations.downgrade if goes_back else migrations.upgrade)(database, to)
    except KeyloftError:
        raise
    except Exception as error:
        if os.environ.get("KEYLOFT_DEBUG"):
            raise
        # The databases' own errors come with the whole statement: the first line says what is wrong.
        raise DatabaseError(f"the migration failed: {str(error).splitlines()[0]}") from error
    what = f"went back ({to})" if goes_back else "has the schema of this version" if to == "head" else "went on"
    remark(f"{without_password(database)} {what}")
    return 0
