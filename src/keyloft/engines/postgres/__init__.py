"""The engine on a PostgreSQL database.

`engine` reads, commits and watches. `reads` uses the statements of `tables` and `log`. `writes` decides groups:
`by_function` calls the function of `function` (`pooled_call` behind a pooler) with what `drafts` has settled,
`by_locking` takes locks first, `attempts` has what both share, `counter_cache` saves reads, and `locked_rows` keeps
batches in order behind a locked row. `server` and `connections` connect, to the host that `hosts` has chosen; `setup`
makes and checks the tables; `errors` explains failures such as a full disk; `notifications` learns of commits of other
processes; `adoption` examines a plugins' table of another program; `maintenance` and `inspection` serve operators.
"""

from keyloft.errors import CannotOpen

try:
    import asyncpg  # type: ignore[import-untyped,unused-ignore]  # noqa: F401
except ImportError as error:
    raise CannotOpen('PostgreSQL needs its driver: run pip install ".[postgres]" in a clone of Keyloft') from error
