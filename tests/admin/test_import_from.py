"""Files of diskcache, sqlitedict and shelve: plain data arrives, and no pickle runs code."""

import asyncio
import collections
import json
import os
import pickle
import shelve
import time
import zlib
from pathlib import Path
from typing import Any

import diskcache  # type: ignore[import-untyped]
import pytest
import sqlitedict  # type: ignore[import-untyped]

import keyloft
from keyloft import InvalidArgument, TransferFailed, admin, limits
from tests.support.everything import run_sql


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


async def stored(url: Path, name: str | None = None) -> dict[Any, Any]:
    async with keyloft.open(url, name=name) as kv:
        return {entry.key: entry.value async for entry in kv.list()}


async def refused(*given: Any, **options: Any) -> admin.ImportFromReport:
    with pytest.raises(TransferFailed, match="not imported, beginning with") as failed:
        await admin.import_from(*given, **options)
    assert isinstance(failed.value.result, admin.ImportFromReport)
    return failed.value.result


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


PLAIN: dict[Any, Any] = {"a": "text", "n": 5, 7: 1.5, 2.5: b"\x00\xff", b"raw": "ü" * 40_000, "long": b"x" * 40_000}


class TestDiskcache:
    async def test_texts_numbers_and_bytes_arrive_with_their_expiry(self, tmp_path: Path, app: Path) -> None:
        with diskcache.Cache(str(tmp_path / "cache")) as cache:
            for key, value in PLAIN.items():
                cache[key] = value
            cache.set("soon", 1, expire=1000)
            cache.set("gone", 1, expire=1000)
        run_sql(str(tmp_path / "cache" / "cache.db"), "UPDATE Cache SET expire_time = 1 WHERE key = 'gone'")
        report = await admin.import_from("diskcache", tmp_path / "cache", app, prefix=("cache",))
        assert report == admin.ImportFromReport(new=len(PLAIN) + 1, expired=1)
        assert await stored(app) == {("cache", key): value for key, value in {**PLAIN, "soon": 1}.items()}
        async with keyloft.open(app) as kv:
            entry = await kv.get(("cache", "soon"))
            assert entry.expires_at is not None
            assert 900 < entry.expires_at.timestamp() - time.time() <= 1000
        again = await admin.import_from("diskcache", tmp_path / "cache", app, prefix=("cache",))
        assert (again.new, again.same) == (0, len(PLAIN) + 1)
        async with keyloft.open(app) as kv:
            await kv.set(("cache", "a"), "other")
        with pytest.raises(TransferFailed, match="is stored already"):
            await admin.import_from("diskcache", tmp_path / "cache", app, prefix=("cache",))

    @pytest.mark.parametrize("existing", ["refuse", "keep", "replace"])
    @pytest.mark.parametrize("disk", [diskcache.Disk, diskcache.JSONDisk])
    async def test_of_two_keys_that_would_be_one_the_second_is_refused_by_name(
        self, tmp_path: Path, app: Path, monkeypatch: pytest.MonkeyPatch, disk: Any, existing: Any
    ) -> None:
        monkeypatch.setattr(limits, "MAINTENANCE_ROWS", 2)  # so that the two are not in one commit
        with diskcache.Cache(str(tmp_path / "cache"), disk=disk) as cache:
            for key in ("a", ("b",), "c", "d", ("a",), "b", ("e",), ("a", "b")):
                cache[key] = ascii(key)
        report = await refused("diskcache", tmp_path / "cache", app, prefix=("x",), trust=True, existing=existing)
        assert (report.new, report.kept, report.replaced, report.refused) == (6, 0, 0, 2)
        [second, first] = report.refusals
        assert second.startswith(("('a',): ", "['a']: "))
        assert "as 'a'," in second
        assert first.startswith("'b': ")
        assert "as ('b',)," in first
        assert await stored(app) == {
            ("x", "a"): "'a'",
            ("x", "b"): "('b',)",
            ("x", "c"): "'c'",
            ("x", "d"): "'d'",
            ("x", "e"): "('e',)",
            ("x", "a", "b"): "('a', 'b')",
        }

    async def test_two_pickles_of_one_key_are_not_merged(self, tmp_path: Path, app: Path) -> None:
        for protocol in (2, 4):
            with diskcache.Cache(str(tmp_path / "cache"), disk_pickle_protocol=protocol) as cache:
                cache["user", 1] = f"protocol {protocol}"
        report = await refused("diskcache", tmp_path / "cache", app, trust=True, existing="replace")
        assert report.refusals == (
            "('user', 1): would have the same key as ('user', 1), which comes before it: rename one of them",
        )
        assert await stored(app) == {("user", 1): "protocol 2"}

    async def test_a_pickle_is_read_only_with_trust_and_never_runs_code(self, tmp_path: Path, app: Path) -> None:
        ran = tmp_path / "ran"
        with diskcache.Cache(str(tmp_path / "cache")) as cache:
            cache["plain"] = {"deep": [1, None, True, ("tuple",)]}
            cache["large"] = list(range(20_000))
            cache["user", 1] = 2
            cache["evil"] = Evil(ran)
            cache["class"] = collections.deque([1])
            cache["set"] = {1, 2}
            cache["fine"] = "text"
        report = await refused("diskcache", tmp_path / "cache", app)
        assert (report.new, report.refused) == (1, 6)
        assert all("CVE-2025-69872" in refusal and "--trust" in refusal for refusal in report.refusals)
        report = await refused("diskcache", tmp_path / "cache", app, trust=True)
        assert (report.new, report.same, report.refused) == (3, 1, 3)
        [evil, kind, of_set] = report.refusals
        assert "'evil': is a pickle with an object of " in evil
        assert "'class': is a pickle with an object of collections.deque; only None, bool" in kind
        assert "'set': value: the type set would not be read back equal" in of_set
        assert await stored(app) == {
            ("plain",): {"deep": [1, None, True, ["tuple"]]},
            ("large",): list(range(20_000)),
            ("user", 1): 2,
            ("fine",): "text",
        }
        assert not ran.exists()

    async def test_folders_of_json_disk_and_of_several_shards_too(self, tmp_path: Path, app: Path) -> None:
        with diskcache.Cache(str(tmp_path / "json"), disk=diskcache.JSONDisk) as cache:
            cache["a"] = {"b": [1, 2, None]}
            cache["users", 1] = "x" * 50_000
        with diskcache.FanoutCache(str(tmp_path / "shards"), shards=3) as shards:
            for number in range(20):
                shards[number] = str(number)
        assert (await admin.import_from("diskcache", tmp_path / "json", app, name="shop")).new == 2
        assert await stored(app, "shop") == {("a",): {"b": [1, 2, None]}, ("users", 1): "x" * 50_000}
        assert (await admin.import_from("diskcache", tmp_path / "shards", app)).new == 20
        assert await stored(app) == {(number,): str(number) for number in range(20)}

    async def test_the_caches_within_a_fanout_cache_are_named_and_can_be_imported_by_themselves(
        self, tmp_path: Path, app: Path
    ) -> None:
        with diskcache.FanoutCache(str(tmp_path / "all"), shards=2) as shards:
            shards["k"] = "v"
            inner, jobs, names = shards.cache("users/new"), shards.deque("jobs"), shards.index("names")
            inner["alice"], names["a"] = 1, "b"
            jobs.append("first")
            for cache in (inner, jobs.cache, names.cache):  # which the end of the block does not close
                cache.close()
        report = await refused("diskcache", tmp_path / "all", app)
        assert (report.new, report.refused) == (1, 3)
        assert report.refusals == tuple(
            f"'{name}': is a folder of its own within this one: import it by itself, under a prefix of its own"
            for name in ("cache/users/new", "deque/jobs", "index/names")
        )
        done = await admin.import_from("diskcache", tmp_path / "all" / "cache/users/new", app, prefix=("users",))
        assert done.new == 1
        assert await stored(app) == {("k",): "v", ("users", "alice"): 1}

    async def test_a_file_outside_of_the_folder_is_not_read(self, tmp_path: Path, app: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        with diskcache.Cache(str(tmp_path / "cache")) as cache:
            cache["k"] = "x" * 40_000
            cache["missing"] = "x" * 40_000
        run_sql(str(tmp_path / "cache" / "cache.db"), "UPDATE Cache SET filename = '../secret' WHERE key = 'k'")
        run_sql(str(tmp_path / "cache" / "cache.db"), "UPDATE Cache SET filename = 'gone' WHERE key = 'missing'")
        report = await refused("diskcache", tmp_path / "cache", app)
        assert report.refusals == (
            "'k': names a file outside of the folder",
            "'missing': can't be read (FileNotFoundError)",
        )

    async def test_neither_a_pipe_nor_a_file_beyond_every_limit_is_read(self, tmp_path: Path, app: Path) -> None:
        with diskcache.Cache(str(tmp_path / "cache")) as cache:
            for key in ("pipe", "large", "fine"):
                cache[key] = key * 20_000
        os.mkfifo(tmp_path / "cache" / "pipe")
        with (tmp_path / "cache" / "large").open("wb") as large:
            large.truncate(4 * 2**30)
        file = str(tmp_path / "cache" / "cache.db")
        run_sql(file, "UPDATE Cache SET filename = key WHERE key IN ('pipe', 'large')")
        report = await asyncio.wait_for(refused("diskcache", tmp_path / "cache", app), 30)
        assert report.new == 1
        assert report.refusals == (
            "'pipe': names something that is not a plain file",
            "'large': has a file of more than 536,870,912 bytes",
        )

    async def test_odd_rows_are_refused_one_by_one(self, tmp_path: Path, app: Path) -> None:
        with diskcache.Cache(str(tmp_path / "cache")) as cache:
            for key in ("far", "past", "when", "bad", "mode", "fine"):
                cache[key] = 1
        for change in (
            "expire_time = 1e300 WHERE key = 'far'",
            "expire_time = -1e999 WHERE key = 'past'",
            "expire_time = 'soon' WHERE key = 'when'",
            "value = CAST(x'22ff22' AS TEXT) WHERE key = 'bad'",
            "mode = char(27) || 'x' WHERE key = 'mode'",
        ):
            run_sql(str(tmp_path / "cache" / "cache.db"), f"UPDATE Cache SET {change}")
        report = await refused("diskcache", tmp_path / "cache", app)
        assert report.refusals == (
            "'when': can't be read (TypeError)",
            "'bad': value: holds a lone surrogate, which is not Unicode text",
            "'mode': is stored in a mode that is not known, '\\x1bx'",
        )
        assert report.expired == 1
        assert await stored(app) == {("far",): 1, ("fine",): 1}

    async def test_json_that_nests_too_deep_is_refused(self, tmp_path: Path, app: Path) -> None:
        with diskcache.Cache(str(tmp_path / "json"), disk=diskcache.JSONDisk) as cache:
            cache["a"] = cache["b"] = 1
        deep = zlib.compress(b"[" * 100_000).hex()
        run_sql(str(tmp_path / "json" / "cache.db"), f"UPDATE Cache SET value = x'{deep}' WHERE rowid = 1")
        assert (await refused("diskcache", tmp_path / "json", app)).refusals == ("'a': can't be read (RecursionError)",)
        assert await stored(app) == {("b",): 1}

    async def test_of_a_damaged_file_what_can_be_read_arrives(self, tmp_path: Path, app: Path) -> None:
        with diskcache.Cache(str(tmp_path / "cache")) as cache:
            for number in range(2000):
                cache[number] = "x" * 100
        file = tmp_path / "cache" / "cache.db"
        run_sql(str(file), "PRAGMA wal_checkpoint(TRUNCATE)")
        data = bytearray(file.read_bytes())
        for page in range(30 * 4096, len(data), 4096):
            data[page : page + 8] = b"\xff" * 8
        file.write_bytes(data)
        report = await refused("diskcache", tmp_path / "cache", app)
        assert 0 < report.new < 2000
        assert report.refusals[-1].startswith("the rest of cache.db: can't be read with SQLite: ")


class TestSqlitedict:
    async def test_json_arrives_and_pickles_with_trust(self, tmp_path: Path, app: Path) -> None:
        file = tmp_path / "dict.sqlite"
        with sqlitedict.SqliteDict(str(file), tablename="as_json", encode=json.dumps, decode=json.loads) as of_json:
            of_json["a"] = {"b": [1, None]}
            of_json["t"] = "text"
            of_json.commit()
        with sqlitedict.SqliteDict(str(file), tablename="pickled") as pickled:
            pickled["a"] = [1]
            pickled["evil"] = Evil(tmp_path / "ran")
            pickled.commit()
        with pytest.raises(InvalidArgument, match="table: expected one of as_json, pickled, because"):
            await admin.import_from("sqlitedict", file, app)
        with pytest.raises(InvalidArgument, match=r"table: .* has no such table, but as_json, pickled"):
            await admin.import_from("sqlitedict", file, app, table="x")
        assert not app.exists()
        assert (await admin.import_from("sqlitedict", file, app, table="as_json")).new == 2
        report = await refused("sqlitedict", file, app, table="pickled")
        assert (report.new, report.refused) == (0, 2)
        report = await refused("sqlitedict", file, app, table="pickled", prefix=("p",), trust=True)
        assert (report.new, report.refused) == (1, 1)
        assert await stored(app) == {("a",): {"b": [1, None]}, ("t",): "text", ("p", "a"): [1]}
        assert not (tmp_path / "ran").exists()

    async def test_a_value_that_is_neither_is_refused(self, tmp_path: Path, app: Path) -> None:
        file = tmp_path / "dict.sqlite"
        with sqlitedict.SqliteDict(str(file), encode=lambda value: value, decode=lambda value: value) as other:
            other["text"] = "not json"
            other["bytes"] = b"\x00not a pickle"
            other.commit()
        report = await refused("sqlitedict", file, app, trust=True)
        assert report.refused == 2

    async def test_what_is_not_text_is_refused(self, tmp_path: Path, app: Path) -> None:
        file = tmp_path / "dict.sqlite"
        with sqlitedict.SqliteDict(str(file), encode=json.dumps, decode=json.loads) as of_json:
            of_json["a"] = of_json["b"] = of_json["c"] = 1
            of_json.commit()
        run_sql(str(file), "UPDATE unnamed SET key = CAST(x'ff' AS TEXT) WHERE key = 'a'")
        run_sql(str(file), "UPDATE unnamed SET value = CAST(x'22ff22' AS TEXT) WHERE key = 'b'")
        report = await refused("sqlitedict", file, app)
        assert report.refusals == (
            "'\\udcff': key: part 1 holds a lone surrogate, which is not Unicode text",
            "'b': value: holds a lone surrogate, which is not Unicode text",
        )
        assert await stored(app) == {("c",): 1}


class TestShelve:
    @pytest.mark.parametrize(
        "index", ["'a', (0, 5", "f()", "'a', 5", "'a', (-5, 5)", "'a', (0, 1000000000000000)", "'\\ud800', (0, 5)"]
    )
    async def test_a_damaged_index_is_refused(self, index: str, tmp_path: Path, app: Path) -> None:
        (tmp_path / "shelf.dir").write_text(f"'fine', (0, 5)\n{index}\n")
        (tmp_path / "shelf.dat").write_bytes(pickle.dumps(1))
        with pytest.raises((InvalidArgument, TransferFailed), match=r"can't be read (as a file of shelve: |\()"):
            await admin.import_from("shelve", tmp_path / "shelf", app, trust=True)

    async def test_every_value_needs_trust(self, tmp_path: Path, app: Path) -> None:
        name = str(tmp_path / "shelf")
        with shelve.open(name) as shelf:
            shelf["ü"] = {"a": 1}
            shelf["evil"] = Evil(tmp_path / "ran")
        assert (await refused("shelve", name, app)).refused == 2
        report = await refused("shelve", name, app, trust=True)
        assert (report.new, report.refused) == (1, 1)
        assert await stored(app) == {("ü",): {"a": 1}}
        assert not (tmp_path / "ran").exists()


async def test_what_is_of_another_kind_is_refused_before_a_database_is_made(tmp_path: Path, app: Path) -> None:
    (tmp_path / "text").write_text("text " * 1000)
    kind: Any
    for kind in ("diskcache", "sqlitedict", "shelve"):
        for source in ("text", "absent"):
            with pytest.raises(InvalidArgument):
                await admin.import_from(kind, tmp_path / source, app)
    with pytest.raises(InvalidArgument, match="is a folder: expected a file of SQLite"):
        await admin.import_from("sqlitedict", tmp_path, app)
    for kind in ("redis", ["diskcache"]):
        with pytest.raises(InvalidArgument, match="kind: expected one of diskcache, sqlitedict, shelve"):
            await admin.import_from(kind, tmp_path / "text", app)
    nothing: Any = None
    with pytest.raises(InvalidArgument, match=r"^source: expected a path, got NoneType$"):
        await admin.import_from("shelve", nothing, app)
    assert not app.exists()
    async with keyloft.open(app):
        pass
    with pytest.raises(InvalidArgument, match="database: expected another file"):
        await admin.import_from("sqlitedict", app, app)


async def test_a_bare_text_is_no_prefix_and_no_consent(tmp_path: Path, app: Path) -> None:
    """`tuple("cache")` has five parts, and a text such as "no" is true."""
    text: Any = "no"
    with pytest.raises(keyloft.InvalidKey, match=r"^prefix: expected a tuple of parts, got a bare str"):
        await admin.import_from("diskcache", tmp_path, app, prefix=text)
    with pytest.raises(InvalidArgument, match=r"^trust: expected True or False, got str$"):
        await admin.import_from("diskcache", tmp_path, app, trust=text)


async def test_damaged_pickles_and_keys_that_meet_are_refused(tmp_path: Path, app: Path) -> None:
    with diskcache.Cache(str(tmp_path / "cache")) as cache:
        for number in range(5):
            cache[number] = {"n": number}
        cache["a"] = 1
        cache[("a",)] = 2
        cache[None] = 3
    for number, data in enumerate([b"", b"\x80\x05", b"cos\nsystem\n(S'true'\ntR.", pickle.dumps({})[:-1]]):
        run_sql(
            str(tmp_path / "cache" / "cache.db"),
            f"UPDATE Cache SET value = x'{data.hex()}' WHERE key = {number} AND raw = 1",
        )
    report = await refused("diskcache", tmp_path / "cache", app, trust=True)
    assert (report.new, report.refused) == (2, 6)
    assert await stored(app) == {(4,): {"n": 4}, ("a",): 1}
