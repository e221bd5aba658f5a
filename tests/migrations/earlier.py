"""Databases as earlier versions made them: their SQL, with an entry of each kind.

Each meaning that a stamp has had is here once. The counter stands at 9.
"""

from collections.abc import Sequence
from typing import Final

LONG_TEXT: Final = "x" * 600

_STAMP: Final = (
    "CREATE TABLE keyloft_version (version_num VARCHAR(32) NOT NULL, "
    "CONSTRAINT keyloft_version_pkc PRIMARY KEY (version_num))"
)
_ENTRIES: Final = {  # by table: key in hex, version, expires_at, value
    "keyloft_tuples": [
        ("026C6F6E6700", 3, "NULL", f'"{LONG_TEXT}"'),  # ("long",)
        ("0275736572730002616C69636500", 1, "NULL", '{"name":"Alice"}'),  # ("users", "alice")
        ("0275736572730002626F6200", 2, "4102444800000", '{"name":"Bob"}'),  # ("users", "bob"), until 2100
    ],
    "keyloft_semantic": [("024100", 4, "NULL", "{}"), ("024200", 5, "NULL", f'"{LONG_TEXT}"')],
}
_AUDIT_LOG: Final = b"a/acme/web/"
_ENTRIES["keyloft_semantic"] = [  # in the order of their keys: three puts of one key, and a conflict
    *[
        (
            (_AUDIT_LOG + version.to_bytes(8) + bytes(2)).hex(),
            version,
            "4102444800000",
            f'{{"a":"{action}","k":"config/flags","w":"harvester:sync","c":"{spec}"}}',
        )
        for version, action, spec in ((6, "put", ""), (7, "put", "s" * 500), (8, "conflict", ""), (9, "put", ""))
    ],
    *_ENTRIES["keyloft_semantic"],
]
_ENTRIES["keyloft_semantic"].insert(  # a damaged record: neither JSON nor UTF-8
    0, ((_AUDIT_LOG + (5).to_bytes(8) + bytes(2)).hex(), 5, "4102444800000", '\xff{"a":"put","k":"')
)
_ROW: Final = "encoding INTEGER NOT NULL, version {long} NOT NULL, expires_at {long}, created_at {long} NOT NULL"
_PLUGINS: Final = {
    "sqlite": "CREATE TABLE plugin_kv_storage (plugin_name VARCHAR(100) NOT NULL, key VARCHAR(255) NOT NULL, "
    "value_json TEXT NOT NULL, expires_at DATETIME, "
    "created_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, "
    "updated_at DATETIME DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')) NOT NULL, "
    "version BIGINT DEFAULT 0 NOT NULL, CONSTRAINT pk_plugin_kv_storage PRIMARY KEY (plugin_name, key))",
    "postgresql": 'CREATE TABLE plugin_kv_storage (plugin_name VARCHAR(100) COLLATE "C" NOT NULL, '
    'key VARCHAR(255) COLLATE "C" NOT NULL, value_json TEXT NOT NULL, expires_at TIMESTAMP WITH TIME ZONE, '
    "created_at TIMESTAMP WITH TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL, "
    "updated_at TIMESTAMP WITH TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL, "
    "version BIGINT DEFAULT 0 NOT NULL, CONSTRAINT pk_plugin_kv_storage PRIMARY KEY (plugin_name, key))",
}


def _index_key(version: int) -> bytes:
    return b"i/acme/web/config/flags\x00" + version.to_bytes(8) + bytes(2)


def _database(
    dialect: str,
    stamp: str,
    *,
    plugins: bool,
    in_order: bool = False,
    large_keys: bool = False,
    counter: str = "keyloft_clock",
    indexed: Sequence[int] = (),
) -> list[str]:
    """The statements that make a database.

    Args:
        dialect: Of the SQL.
        stamp: The revision that the database says it has.
        plugins: Whether it has the plugins' table.
        in_order: Whether SQLite's rows lie in the order of their keys.
        large_keys: Whether large values have their keys.
        counter: The name of the version counter's table.
        indexed: Versions whose audit records have an index row.
    """
    long, binary, literal = ("INTEGER", "BLOB", "X'{}'") if dialect == "sqlite" else ("BIGINT", "BYTEA", "'\\x{}'")
    made = [
        _STAMP,
        f"CREATE TABLE {counter} (id {long} NOT NULL PRIMARY KEY CHECK (id = 1), version {long} NOT NULL)",
        f"INSERT INTO {counter} (id, version) VALUES (1, 9)",
    ]
    for table, entries in _ENTRIES.items():
        columns = f"key {binary} NOT NULL PRIMARY KEY, {_ROW.format(long=long)}, updated_at {long} NOT NULL"
        if in_order:
            made.append(f"CREATE TABLE {table} ({columns}, large INTEGER, value BLOB) WITHOUT ROWID")
            key = "key BLOB NOT NULL, " if large_keys else ""
            made.append(f"CREATE TABLE {table}_large (id INTEGER NOT NULL PRIMARY KEY, {key}value BLOB NOT NULL)")
        else:
            made.append(f"CREATE TABLE {table} ({columns}, value {binary} NOT NULL)")
        made.append(f"CREATE INDEX {table}_expires ON {table} (expires_at) WHERE expires_at IS NOT NULL")
        if table == "keyloft_semantic":
            entries = [*entries, *[(_index_key(version).hex(), version, "NULL", "") for version in indexed]]
        for key, version, expires_at, value in entries:
            stored, data = literal.format(key), literal.format(value.encode("latin-1").hex())
            names, values = (
                "key, encoding, version, expires_at, created_at, updated_at",
                f"0, {version}, {expires_at}, 1, 2",
            )
            if in_order and len(value) > 512:
                made.append(f"INSERT INTO {table} ({names}, large) VALUES ({stored}, {values}, {version})")
                if large_keys:
                    made.append(f"INSERT INTO {table}_large VALUES ({version}, {stored}, {data})")
                else:
                    made.append(f"INSERT INTO {table}_large VALUES ({version}, {data})")
            else:
                made.append(f"INSERT INTO {table} ({names}, value) VALUES ({stored}, {values}, {data})")
    if plugins:
        made += [
            _PLUGINS[dialect],
            "CREATE INDEX idx_plugin_kv_expires ON plugin_kv_storage (expires_at) WHERE expires_at IS NOT NULL",
            "CREATE INDEX idx_plugin_kv_prefix ON plugin_kv_storage (plugin_name, key)",
            "INSERT INTO plugin_kv_storage (plugin_name, key, value_json, version) VALUES ('trivia', 'score', '7', 6)",
        ]
    return [*made, f"INSERT INTO keyloft_version (version_num) VALUES ('{stamp}')"]


def _renamed_counter(dialect: str, stamp: str, *, plugins: bool, indexed: Sequence[int] = ()) -> list[str]:
    """A database of the revisions 0004 to 0007: without a change log; before 0006, without some index rows."""
    is_file = dialect == "sqlite"
    return _database(
        dialect,
        stamp,
        plugins=plugins,
        in_order=is_file,
        large_keys=is_file,
        counter="keyloft_version_counter",
        indexed=indexed,
    )


DATABASES: Final = {
    "sqlite, 0001": _database("sqlite", "0001", plugins=False),
    "sqlite, 0002": _database("sqlite", "0002", plugins=True),
    "sqlite, 0002 after a step down": _database("sqlite", "0002", plugins=False),
    "sqlite, 0002 for half an hour": _database("sqlite", "0002", plugins=False, in_order=True),
    "sqlite, 0003 for half an hour": _database("sqlite", "0003", plugins=True, in_order=True),
    "sqlite, 0003": _database("sqlite", "0003", plugins=True, in_order=True, large_keys=True),
    "sqlite, 0004": _renamed_counter("sqlite", "0004", plugins=False),
    "sqlite, 0005 without an index of audit records": _renamed_counter("sqlite", "0005", plugins=True),
    "sqlite, 0005 with an index of some": _renamed_counter("sqlite", "0005", plugins=True, indexed=(7,)),
    "sqlite, 0006": _renamed_counter("sqlite", "0006", plugins=False, indexed=(6, 7, 9)),
    "sqlite, 0007": _renamed_counter("sqlite", "0007", plugins=True, indexed=(6, 7, 9)),
    "postgresql, 0001": _database("postgresql", "0001", plugins=False),
    "postgresql, 0002": _database("postgresql", "0002", plugins=True),
    "postgresql, 0002 after a step down": _database("postgresql", "0002", plugins=False),
    "postgresql, 0003": _database("postgresql", "0003", plugins=True),
    "postgresql, 0004": _renamed_counter("postgresql", "0004", plugins=False),
    "postgresql, 0005 without an index of audit records": _renamed_counter("postgresql", "0005", plugins=True),
    "postgresql, 0005 with an index of some": _renamed_counter("postgresql", "0005", plugins=True, indexed=(7,)),
    "postgresql, 0006": _renamed_counter("postgresql", "0006", plugins=False, indexed=(6, 7, 9)),
    "postgresql, 0007": _renamed_counter("postgresql", "0007", plugins=True, indexed=(6, 7, 9)),
}
