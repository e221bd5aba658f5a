"""The engine on a PostgreSQL database.

`engine` reads, commits and watches; `reads` and `writes` use the statements of `tables`; `server` and `connections`
connect; `errors` explains failures such as a full disk; `notifications` learns of commits of other processes;
`maintenance` and `inspection` serve operators.
"""

from keyloft.errors import CannotOpen

try:
    import asyncpg  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
except ImportError as error:
    raise CannotOpen('PostgreSQL needs its driver: run pip install ".[postgres]" in a clone of Keyloft') from error
