"""The PL/pgSQL functions that commit a group in one statement, and the arguments that they take.

A group is settled from what was read without a lock. The function locks the version counter, compares all rows that
decided something with what was read, and writes the group if nothing has changed. It answers with two numbers, the
version before the group and its time, or with one of the codes below. It never raises for a lost race, which would fill
the server's log, and never returns rows, for which a stopped client would make it wait while it holds the lock.

While it holds the counter it waits for no row. Commits of Keyloft lock rows only under the counter, so a row that is
locked is another client's, and its `xmax` is not 0. So rows are first updated on the condition that they are as they
were read, and that `xmax` is 0. If one is not (`xmax` may also be left over from before), this is undone, and the rows
are compared, locked without waiting, and updated.

The first commit on a new timeline lets the versions jump: the former primary may have given some that are lost.

All other commits wait meanwhile, so the function reads the clock after each statement, and gives up if it is late.

There is one such function for groups of each space, and one for groups of several. PostgreSQL takes half a microsecond
for each argument of a function, bound or not.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

from msgspec import Struct

from keyloft import limits
from keyloft.core import schema
from keyloft.core.records import Space
from keyloft.engines.postgres.errors import TOO_SLOW
from keyloft.engines.postgres.log import CHANGES, CHANNEL, COUNTER, JUMPED, milliseconds, trim
from keyloft.engines.postgres.tables import LAYOUTS, PostgresLayout

# Answers in place of a version. Nothing was written.
LOCKED: Final = -1
"""Another client has locked a row."""
CHANGED: Final = -2
"""A row is not as it was read, or has expired since, or one that the group writes has."""
REFUSED: Final = -3
"""This id was abandoned, or the time up to which it could be committed has passed."""
CLOCK_SET_BACK: Final = -4
"""The last commit is this many milliseconds ahead of the clock."""
NO_COUNTER: Final = -5
WRONG_ISOLATION: Final = -6
"""The transaction is not READ COMMITTED, so it would not see what others have committed."""

SPACES: Final = tuple(LAYOUTS)
_PREFIXES: Final = {Space.TUPLES: "t", Space.SEMANTIC: "s", Space.PLUGINS: "p"}
"""By space, how the names of its arguments begin, and how the name of its function ends."""

_WRITES: Final = ("update", "put", "insert", "touch", "remove")
_RACE_LOST: Final = "KL001"
"""The SQLSTATE by which updates are undone; the function catches it."""
_COMMON: Final = {
    "commit_id": "bytea",
    "numbers": "bigint[]",
    "given_clock": "bigint",  # NULL for the server's clock
    "parts": "bytea[]",  # rows for the change log
    "announcer": "text",  # the name of the process in notifications; NULL where no one is to be notified
    "setting_names": "text[]",  # of this transaction; NULL where the session has them
    "setting_values": "text[]",
}
NUMBERS: Final = (
    "not_after",  # by the server's clock: after it, the log may no longer hold the abandoned id
    "read_at",  # the time by which the group was settled
    "valid_from",  # before it, an entry that the group writes has not expired, although it was settled as expired
    "valid_until",  # from it on, one has expired
    "counter_timeout",  # how many milliseconds it waits for the version counter
    "most_milliseconds",  # how long it may hold the version counter
    "versions",  # how many the group takes
    "kept_for",  # how many milliseconds the log keeps a change
    "kept_bytes",
)
"""What the argument `numbers` holds, in this order."""


def _arguments(layout: PostgresLayout, prefix: str) -> dict[str, dict[str, str]]:
    """For each kind of rows of a space, its arrays and their types."""
    keys = dict(zip([f"{name}s" for name in layout.key], layout.key_types, strict=True))
    values = {f"{name}s": kind for name, kind in layout.columns.items()}
    seen = {"versions": "bigint", "dues": "bigint", "stamps": layout.stamp_type}
    written = values | {"versions": "bigint", "dues": "bigint"}
    kinds = {
        "read": keys | seen,  # rows that decided something, except updates
        "update": written | {f"seen_{name}": kind for name, kind in seen.items()},  # rows that were read and are stored
        "put": written,  # rows that were not read
        "insert": written | ({} if layout.stamp else {"suffixes": "bytea"}),  # rows that are not stored; Appends
        "touch": keys | {"dues": "bigint"},
        "remove": keys,
    }
    return {
        kind: {f"{prefix}_{kind}_{name}": f"{of}[]" for name, of in columns.items()} for kind, columns in kinds.items()
    }


ARGUMENTS: Final = {space: _arguments(LAYOUTS[space], _PREFIXES[space]) for space in SPACES}
"""By space and kind of rows, the names and types of the arguments."""


def _types(spaces: Iterable[Space]) -> dict[str, str]:
    kinds = [kind for space in spaces for kind in ARGUMENTS[space].values()]
    return _COMMON | {name: of for kind in kinds for name, of in kind.items()}


TYPES: Final = _types(SPACES)
"""The types of all arguments, by name. One that is left out is NULL."""


def _keys(space: Space, kind: str) -> list[str]:
    return list(ARGUMENTS[space][kind])[: len(LAYOUTS[space].key)]


def _any_of(space: Space, *kinds: str) -> str:
    return " OR ".join([f"{_keys(space, kind)[0]} IS NOT NULL" for kind in kinds])


def _in_time() -> str:
    return f"IF clock_timestamp() > until THEN RAISE SQLSTATE '{TOO_SLOW}' USING MESSAGE = 'too slow'; END IF"


def _wait_for_table(space: Space) -> str:
    """Waits for a client that has locked the whole table, before the counter is locked; not for long."""
    return f"""
    IF {_any_of(space, *_WRITES)} THEN
        LOCK TABLE {LAYOUTS[space].table} IN ROW EXCLUSIVE MODE;
    END IF;"""


_SEEN: Final = ("version", "due", "stamp")
"""The columns of a row that are compared."""


def _compare(space: Space, kind: str) -> str:
    layout, arguments = LAYOUTS[space], ARGUMENTS[space][kind]
    names = [*layout.key, *_SEEN]
    bound = [*_keys(space, kind), *list(arguments)[-len(_SEEN) :]]
    version, due = layout.version("version"), layout.milliseconds("expires_at")
    stored = f"{version} AS version, {due} AS due, {layout.seen_stamp} AS stamp, xmax <> '0' AS is_held"
    same_key = " AND ".join([f"{layout.table}.{name} = seen.{name}" for name in layout.key])
    # A stamp that the group does not know is not compared.
    differs = "stored.version IS DISTINCT FROM seen.version OR stored.due IS DISTINCT FROM seen.due"
    differs = f"{differs} OR stored.stamp <> seen.stamp"
    return f"""
    IF {_any_of(space, kind)} THEN
        SELECT bool_or({differs} OR (seen.due <= read_at) <> (seen.due <= now_at)), bool_or(stored.is_held)
            INTO is_changed, is_held FROM unnest({", ".join(bound)}) AS seen ({", ".join(names)})
            LEFT JOIN LATERAL (SELECT {stored} FROM {layout.table} WHERE {same_key} LIMIT 1) AS stored ON true;
        IF is_changed THEN
            setting := set_config('synchronous_commit', 'off', true);  -- nothing is written: don't wait for the disk
            RETURN ARRAY[{CHANGED}, now_at];
        END IF;
        may_wait := may_wait OR coalesce(is_held, false);
        {_in_time()};
    END IF;"""


def _update_unless_lost(space: Space) -> str:
    """Updates rows unless one has changed or may be locked."""
    layout, arguments = LAYOUTS[space], ARGUMENTS[space]
    update, put = list(arguments["update"]), list(arguments["put"])
    same = [
        f"{layout.version('old.version')} = new.seen_version",
        f"{layout.milliseconds('old.expires_at')} IS NOT DISTINCT FROM new.seen_due",
        "(new.seen_due <= read_at) IS NOT DISTINCT FROM (new.seen_due <= now_at)",
        f"{layout.seen_stamp.replace('updated_at', 'old.updated_at')} = new.seen_stamp",
        "old.xmax = '0'",
    ]
    seen = [f"seen_{name}" for name in _SEEN]
    return f"""
            IF {_any_of(space, "update")} THEN
                {layout.update_rows("base", "now_at", update, *seen, condition=" AND ".join(same))};
                GET DIAGNOSTICS rows_written = ROW_COUNT;
                IF rows_written < cardinality({update[0]}) THEN
                    RAISE SQLSTATE '{_RACE_LOST}';
                END IF;
                {_in_time()};
            END IF;
            IF {_any_of(space, "put")} THEN
                {layout.update_rows("base", "now_at", put, condition="old.xmax = '0'")};
                GET DIAGNOSTICS rows_written = ROW_COUNT;
                IF rows_written < cardinality({put[0]}) THEN
                    SELECT count(*) INTO rows_stored FROM {layout.of_keys(*_keys(space, "put"))};
                    IF rows_written < rows_stored THEN
                        RAISE SQLSTATE '{_RACE_LOST}';
                    END IF;
                    {layout.insert("base", "now_at", put, over=False)};
                END IF;
                {_in_time()};
            END IF;"""


def _lock(space: Space) -> str:
    columns = zip(*[_keys(space, kind) for kind in _WRITES], strict=True)
    return f"""
        IF {_any_of(space, *_WRITES)} THEN
            {LAYOUTS[space].lock_rows([" || ".join(names) for names in columns])} INTO rows_stored, rows_written;
            IF rows_written < rows_stored THEN
                setting := set_config('synchronous_commit', 'off', true);
                RETURN ARRAY[{LOCKED}, now_at];
            END IF;
            {_in_time()};
        END IF;"""


def _update(space: Space) -> str:
    """Updates rows that are compared and locked."""
    layout, arguments = LAYOUTS[space], ARGUMENTS[space]
    update, put = list(arguments["update"])[: -len(_SEEN)], list(arguments["put"])
    return f"""
        IF {_any_of(space, "update")} THEN
            {layout.update_rows("base", "now_at", update)};
            {_in_time()};
        END IF;
        IF {_any_of(space, "put")} THEN
            {layout.insert("base", "now_at", put)};
            {_in_time()};
        END IF;"""


def _write(space: Space) -> str:
    layout, arguments = LAYOUTS[space], ARGUMENTS[space]
    insert = layout.insert("base", "now_at", list(arguments["insert"]), with_suffix=not layout.stamp)
    return f"""
    IF {_any_of(space, "remove")} THEN
        {layout.delete_rows(list(arguments["remove"]))};
        {_in_time()};
    END IF;
    IF {_any_of(space, "insert")} THEN
        {insert};
        {_in_time()};
    END IF;
    IF {_any_of(space, "touch")} THEN
        {layout.touch_rows("now_at", list(arguments["touch"]))};
        {_in_time()};
    END IF;"""


def _body(spaces: Iterable[Space], timeline: str) -> str:
    """The text of the function for groups of these spaces; `timeline` is SQL for that of the server."""

    def for_each_space(step: Callable[..., str], *arguments: str) -> str:
        return "".join([step(space, *arguments) for space in spaces])

    declared = "".join([f"\n    {name} bigint := numbers[{at}];" for at, name in enumerate(NUMBERS, 1)])
    lock = (
        "SELECT counter.version, counter.at, counter.timeline INTO base, last_at, last_timeline "
        f"FROM {COUNTER} AS counter WHERE id = 1 FOR UPDATE"
    )
    return f"""
#variable_conflict use_column
DECLARE{declared}
    base bigint;
    now_at bigint;
    last_at bigint;
    last_timeline bigint;
    this_timeline bigint;
    clock bigint;
    until timestamptz;
    log_size bigint;
    rows_stored bigint;
    rows_written bigint;
    setting text;
    is_changed boolean;
    is_held boolean;
    may_wait boolean := false;
    is_written boolean := false;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN ARRAY[{WRONG_ISOLATION}, 0];
    END IF;
    IF setting_names IS NOT NULL THEN
        PERFORM set_config(name, value, true) FROM unnest(setting_names, setting_values) AS given (name, value);
    END IF;
{for_each_space(_wait_for_table)}
    -- Once the counter is locked, all wait. Another client may have locked a row, or inserted one: not for long.
    setting := set_config('lock_timeout', '{round(1000 * limits.POSTGRES_INSERT_SECONDS)}', true);
    {lock} SKIP LOCKED;
    IF NOT FOUND THEN
        setting := set_config('lock_timeout', counter_timeout::text, true);
        {lock};
        IF NOT FOUND THEN
            RETURN ARRAY[{NO_COUNTER}, 0];
        END IF;
        setting := set_config('lock_timeout', '{round(1000 * limits.POSTGRES_INSERT_SECONDS)}', true);
    END IF;
    this_timeline := coalesce({timeline}, last_timeline);
    IF last_timeline NOT IN (0, this_timeline) THEN
        base := {JUMPED.replace("version", "base")};
    END IF;
    until := clock_timestamp() + most_milliseconds * interval '1 millisecond';
    clock := {milliseconds("clock_timestamp()")};
    SELECT EXISTS (SELECT FROM {CHANGES} AS logged WHERE logged.commit_id = $1),
        (SELECT logged.size FROM {CHANGES} AS logged ORDER BY logged.version DESC, logged.part DESC LIMIT 1)
        INTO is_changed, log_size;
    IF clock > not_after OR is_changed THEN
        RETURN ARRAY[{REFUSED}, clock];
    END IF;
    clock := coalesce(given_clock, clock);
    now_at := greatest(clock, last_at);
    IF now_at - clock > {round(1000 * limits.CLOCK_AHEAD_SECONDS)} THEN
        RETURN ARRAY[{CLOCK_SET_BACK}, now_at - clock];
    END IF;
    IF now_at < valid_from OR now_at >= valid_until THEN
        setting := set_config('synchronous_commit', 'off', true);  -- nothing is written: don't wait for the disk
        RETURN ARRAY[{CHANGED}, now_at];
    END IF;
{for_each_space(_compare, "read")}
    IF NOT may_wait THEN
        BEGIN
{for_each_space(_update_unless_lost)}
            is_written := true;
        EXCEPTION WHEN SQLSTATE '{_RACE_LOST}' THEN
            NULL;
        END;
    END IF;
    IF NOT is_written THEN
{for_each_space(_compare, "update")}
{for_each_space(_lock)}
{for_each_space(_update)}
    END IF;
{for_each_space(_write)}
    UPDATE {COUNTER} SET version = base + versions, at = now_at, timeline = this_timeline WHERE id = 1;
    log_size := coalesce(log_size, 0);
    IF cardinality(parts) = 1 THEN
        INSERT INTO {CHANGES} (version, part, base, at, size, commit_id, changes)
            VALUES (base + versions, 0, base, now_at, log_size + octet_length(parts[1]), $1, parts[1]);
    ELSE
        INSERT INTO {CHANGES} (version, part, base, at, size, commit_id, changes)
            SELECT base + versions, new.place - 1, base, now_at,
                log_size + sum(octet_length(new.part)) OVER (ORDER BY new.place),
                CASE new.place WHEN 1 THEN $1 END, new.part
            FROM unnest(parts) WITH ORDINALITY AS new (part, place);
    END IF;
    IF cardinality(parts) > 1 OR base / {limits.TRIM_EVERY} <> (base + versions) / {limits.TRIM_EVERY} THEN
        {trim("now_at", "log_size", "kept_for", "kept_bytes")};
    END IF;
    IF announcer IS NOT NULL THEN
        PERFORM pg_notify('{CHANNEL}', announcer || ' ' || (base + versions));
    END IF;
    RETURN ARRAY[base, now_at];
END
"""


PREFIX: Final = "keyloft_commit_"
"""How the names of all such functions begin; the revision of the schema follows."""
_TABLES: Final = (*[layout.table for layout in LAYOUTS.values()], COUNTER, CHANGES)

_SINGLE: Final = {frozenset({space}): f"_{prefix}" for space, prefix in _PREFIXES.items()}
"""By the spaces of a group, how the name of its function ends; that for several spaces has no ending."""

FIND_TABLES: Final = (
    "SELECT name, quote_ident(nspname), pg_class.oid::bigint "
    f"FROM unnest('{{{','.join(_TABLES)}}}'::text[]) AS name JOIN pg_class ON pg_class.oid = to_regclass(name) "
    "JOIN pg_namespace ON pg_namespace.oid = relnamespace"
)
"""Selects the tables that the function uses, with their schemas and their numbers."""


class CommitFunctions(Struct, frozen=True):
    """The functions of this version of Keyloft: processes of several versions may share a database.

    They stand in the schema of the version counter, and name their tables with their schemas. So they are the same
    functions, and write to the same tables, whatever `search_path` a session has.
    """

    name: str
    """The name of the function for groups of several spaces, with its schema; the other names begin with it."""
    create: str
    """Creates the functions that are missing."""
    may_call: str
    """Selects whether the functions exist, and this user may call them."""
    find_others: str
    """Selects the functions of other revisions of the schema, which this user may drop: no process needs them."""

    @property
    def names(self) -> list[str]:
        """Of all."""
        return [self.name, *[f"{self.name}{ending}" for ending in _SINGLE.values()]]

    def name_for(self, spaces: Iterable[Space]) -> str:
        """The name of the function for a group of these spaces."""
        return f"{self.name}{_SINGLE.get(frozenset(spaces), '')}"

    def call(self, spaces: Iterable[Space], names: Iterable[str], *, has_text: bool = False) -> str:
        """The statement that calls a function with these arguments bound; arrays of integers are text.

        With `has_text`, the same holds for all arrays of rows.
        """
        bound = [f"{name} => {_bound(name, at, has_text=has_text)}" for at, name in enumerate(names, 1)]
        return f"SELECT {self.name_for(spaces)}({', '.join(bound)})"


def _bound(name: str, at: int, *, has_text: bool) -> str:
    kind = TYPES[name]
    is_text = kind in ("bigint[]", "int[]") or (has_text and name not in _COMMON)
    return f"${at}::text::{kind}" if is_text else f"${at}::{kind}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@cache
def functions_in(*homes: tuple[str, str], timeline: str = schema.TIMELINE) -> CommitFunctions:
    """The functions for tables that are in schemas: their names, and the names of the schemas.

    `timeline` is SQL for the timeline of the server.
    """
    schemas = dict(homes)
    tables = {name: f"{schemas[name]}.{name}" if name in schemas else name for name in _TABLES}
    made = {}
    for ending, spaces in {"": SPACES, **{ending: tuple(one) for one, ending in _SINGLE.items()}}.items():
        body = re.sub(rf"\b({'|'.join(tables)})\b", lambda found: tables[found[1]], _body(spaces, timeline))
        arguments = ", ".join([f"{name} {kind} DEFAULT NULL" for name, kind in _types(spaces).items()])
        quote = f"$keyloft_{_digest(body)}$"  # the name of a schema may contain any quote that is known before
        made[ending] = f"({arguments}) RETURNS bigint[] LANGUAGE plpgsql AS {quote}{body}{quote}"
    home = schemas.get(COUNTER, "public")
    name = f"{home}.{PREFIX}{schema.REVISION}_{_digest(''.join(made.values()))}"
    literals = ["'{}'".format(f"{name}{ending}".replace("'", "''")) for ending in made]
    return CommitFunctions(
        name,
        create="; ".join([f"CREATE OR REPLACE FUNCTION {name}{ending} {text}" for ending, text in made.items()]),
        may_call="SELECT bool_and(coalesce(has_function_privilege(to_regproc(name), 'EXECUTE'), false)) "
        f"FROM unnest(ARRAY[{', '.join(literals)}]) AS name",
        find_others="SELECT pg_proc.oid::regprocedure::text FROM pg_proc "
        f"WHERE pronamespace = (SELECT pronamespace FROM pg_proc WHERE oid = to_regproc({literals[0]})) "
        f"AND proname ~ '^{PREFIX}[0-9]+_' "
        f"AND proname !~ '^{PREFIX}{schema.REVISION}_' AND pg_has_role(proowner, 'USAGE')",
    )
