"""`keyloft semantic …`, as processes, on a file, on PostgreSQL and over NATS."""

import asyncio
import itertools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest

import keyloft
from keyloft.semantic import Escalated, Semantics, SemanticService, SemanticStore
from keyloft.server.isolation import isolate
from tests.cli.commands import LONGEST_SECONDS, ON_A_FILE, SURROUNDINGS, Keyloft, at_a_terminal, run_command
from tests.support.nats import private_server

PROJECT = "tenant/acme/project/web"
FLAG = f"{PROJECT}/flags/new-ui"


def shown(outcome: tuple[int, str, str]) -> Any:
    code, stdout, stderr = outcome
    assert (code, stderr) == (0, "")
    lines = [json.loads(line) for line in stdout.splitlines()]
    return lines[0] if len(lines) == 1 else lines


def test_an_entry_is_put_and_read_with_its_semantics(run: Keyloft) -> None:
    put = shown(
        run(
            *("semantic", "put", FLAG, "-5", "--purpose", "feature_flag", "--writer", "console:rollout"),
            *("--consumer", "web", "--consumer", "mobile", "--ttl", "1000", "--spec-ref", "adr/7"),
        )
    )
    assert shown(run("semantic", "get", FLAG)) == put
    assert (put["key"], put["value"], put["lastWriter"], put["specRef"]) == (FLAG, -5, "console:rollout", "adr/7")
    assert put["semantics"]["consumerHints"] == ["web", "mobile"]
    listed = shown(run("semantic", "list", PROJECT))
    assert "value" not in listed
    assert shown(run("semantic", "list", PROJECT, "--values")) == put
    code, stdout, stderr = run("semantic", "put", FLAG, "1", "--purpose", "feature_flag", "--expected-version", "0")
    assert (code, stdout) == (1, "")
    assert stderr.startswith("keyloft: VERSION_CONFLICT: ")
    trail = shown(run("semantic", "audit", FLAG))
    assert [record["action"] for record in trail] == ["put", "conflict"]
    assert shown(run("semantic", "audit", PROJECT, "--reverse", "--limit", "1"))["action"] == "conflict"


def test_an_entry_is_deleted_and_restored(run: Keyloft) -> None:
    put = shown(run("semantic", "put", FLAG, "true", "--purpose", "feature_flag"))
    wrong = str(put["version"] + 1)
    code, stdout, stderr = run("semantic", "delete", FLAG, "--expected-version", wrong)
    assert (code, stdout) == (1, "")
    assert stderr.startswith("keyloft: VERSION_CONFLICT: ")
    deleted = shown(run("semantic", "delete", FLAG, "--expected-version", str(put["version"]), "--writer", "me:test"))
    assert (deleted["key"], deleted["value"]) == (FLAG, True)
    assert run("semantic", "get", FLAG)[0] == 1
    assert run("semantic", "delete", FLAG)[::2] == (1, f"keyloft: there is no entry {FLAG}\n")
    restored = shown(run("semantic", "restore", FLAG, "--writer", "me:again", "--json"))
    assert (restored["value"], restored["lastWriter"]) == (True, "me:again")
    assert shown(run("semantic", "get", FLAG)) == restored
    assert run("semantic", "restore", FLAG)[0] == 1
    actions = [record["action"] for record in shown(run("semantic", "audit", FLAG))]
    assert actions == ["put", "conflict", "delete", "delete", "restore", "conflict"]
    code, stdout, stderr = run("semantic", "restore", f"{PROJECT}/flags/absent")
    assert (code, stdout) == (1, "")
    assert stderr.startswith("keyloft: NOTHING_TO_RESTORE: ")


async def watched(watching: "asyncio.Future[tuple[int, str, str]]", store: SemanticStore) -> Any:
    """What a watch that ends after two changes prints, while entries are put again and again."""
    about: dict[str, Any] = {"expected_version": "*", "writer": "w:watch"}
    numbers = itertools.count()
    async with asyncio.timeout(LONGEST_SECONDS):
        while not watching.done():
            number = next(numbers)
            await store.put(FLAG, number, semantics=Semantics("feature_flag"), **about)
            await store.put(f"{PROJECT}/other/x", number, semantics=Semantics("config"), **about)
            await asyncio.wait([watching], timeout=0.05)
        return shown(await watching)


async def test_changes_are_shown_as_they_happen(tmp_path: Path) -> None:
    async with keyloft.open(tmp_path / "app.db") as kv, SemanticStore(kv) as store:
        await store.put(FLAG, 0, expected_version=0, writer="w", semantics=Semantics("feature_flag"))
        command = ("semantic", "watch", f"{PROJECT}/flags/", "--limit", "2")
        run = partial(run_command, {**SURROUNDINGS, "KEYLOFT_DATABASE_URL": str(tmp_path / "app.db")})
        first, second = await watched(asyncio.ensure_future(asyncio.to_thread(run, *command)), store)
        assert (first["key"], first["lastWriter"], first["deleted"]) == (FLAG, "w:watch", False)
        assert second["version"] > first["version"]
        assert "value" not in first
        [first, _] = await watched(asyncio.ensure_future(asyncio.to_thread(run, *command, "--values")), store)
        assert type(first["value"]) is int


@pytest.mark.slow
@ON_A_FILE
def test_locks_are_shown_with_their_holders(run: Keyloft, environment: dict[str, str]) -> None:
    run("semantic", "put", FLAG, "true", "--purpose", "feature_flag")
    run("semantic", "put", f"{PROJECT}/locks/sync", "1", "--purpose", "lock", "--ttl", "1000", "--writer", "w:sync")
    held = shown(run("semantic", "locks", PROJECT))
    assert (held["key"], held["lastWriter"], held["fence"]) == (f"{PROJECT}/locks/sync", "w:sync", held["version"])
    code, seen = at_a_terminal({**environment, "COLUMNS": "150"}, "semantic", "locks", PROJECT)
    assert code == 0
    assert "locks/sync" in seen
    assert "w:sync" in seen
    empty = "tenant/acme/project/empty"
    assert at_a_terminal(environment, "semantic", "locks", empty) == (0, f"no lock is held in {empty}\r\n")
    for command in ("list", "audit"):
        assert "flags/new-ui" in at_a_terminal({**environment, "COLUMNS": "150"}, "semantic", command, PROJECT)[1]


def test_dead_letters_are_listed_retried_and_dropped(run: Keyloft, environment: dict[str, str]) -> None:
    async def give_up(value: str) -> None:
        async with keyloft.open(environment["KEYLOFT_DATABASE_URL"]) as kv, SemanticStore(kv) as store:
            with pytest.raises(Escalated):
                await store.retrying(conflict_pauses=[]).run(
                    lambda: store.put(FLAG, value, expected_version=7, writer="w", semantics=Semantics("config"))
                )

    asyncio.run(give_up("secret"))
    asyncio.run(give_up("other"))
    [first, second] = shown(run("semantic", "dead-letters", "list", PROJECT))
    assert first["operations"] == [{"action": "put", "key": FLAG, "expectedVersion": 7, "lastWriter": "w"}]
    assert "secret" not in json.dumps(first)
    code, _, stderr = run("semantic", "dead-letters", "retry", PROJECT, first["id"])
    assert (code, stderr.startswith("keyloft: VERSION_CONFLICT: ")) == (1, True)
    made = run("semantic", "dead-letters", "retry", PROJECT, first["id"], "--expected-version", "*")
    assert shown(made)["value"] == "secret"
    assert run("semantic", "dead-letters", "drop", PROJECT, second["id"])[0] == 2
    code, seen = at_a_terminal(environment, "semantic", "dead-letters", "drop", PROJECT, second["id"], answer="n\n")
    assert (code, "What it holds is lost then." in seen, "Nothing was changed." in seen) == (1, True, True)
    assert run("semantic", "dead-letters", "drop", PROJECT, second["id"], "--yes")[0] == 0
    assert run("semantic", "dead-letters", "list", PROJECT) == (0, "", "")
    assert run("semantic", "dead-letters", "drop", PROJECT, second["id"], "--yes")[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("get", "users/alice"),
        ("get", f"{PROJECT}/Bad"),
        ("put", FLAG, "1", "--purpose", "lock"),
        ("put", FLAG, "1", "--purpose", "unknown"),
        ("put", FLAG, "1", "--purpose", "config", "--expected-version", "x"),
        ("list", "tenant/acme"),
        ("audit", PROJECT, "--limit", "0"),
    ],
)
@ON_A_FILE
def test_a_wrong_call_is_explained(run: Keyloft, arguments: tuple[str, ...]) -> None:
    run("semantic", "put", FLAG, "1", "--purpose", "config")
    code, stdout, stderr = run("semantic", *arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("keyloft: ")


def test_an_absent_entry_ends_with_code_1(run: Keyloft) -> None:
    run("semantic", "put", FLAG, "1", "--purpose", "config")
    assert run("semantic", "get", f"{PROJECT}/absent") == (1, "", f"keyloft: there is no entry {PROJECT}/absent\n")


def test_a_purpose_of_ones_own_is_registered_by_a_setting(run: Keyloft) -> None:
    assert run("semantic", "put", FLAG, "1", "--purpose", "own", "--purposes", "own,other")[0] == 0


def test_a_value_of_900_levels_is_put_shown_exported_and_imported(run: Keyloft, environment: dict[str, str]) -> None:
    value = "[" * 900 + "]" * 900
    put = run("semantic", "put", FLAG, value, "--purpose", "feature_flag")
    assert f'"value":{value}' in put[1]
    assert run("semantic", "get", FLAG) == put
    exported = run("export")[1]
    assert value in exported
    assert run("import", "-", "--replace", given=exported.encode())[0] == 0
    code, screen = at_a_terminal(environment, "semantic", "get", FLAG)
    assert (code, screen.count("[")) == (0, 901)  # also that of consumerHints
    assert value in run("semantic", "list", PROJECT, "--values")[1]


@ON_A_FILE
def test_a_narrow_terminal_divides_a_path_after_its_slashes_only(environment: dict[str, str], run: Keyloft) -> None:
    path = f"{PROJECT}/documents/sharepoint/delta"
    shown(run("semantic", "put", path, "1", "--purpose", "index_version", "--writer", "harvester:synchronize"))
    screen = at_a_terminal({**environment, "COLUMNS": "80", "NO_COLOR": "1"}, "semantic", "list", PROJECT)[1]
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen).splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for line in lines for word in line.split()}
    assert words >= {"documents/", "sharepoint/", "delta", "harvester:", "synchronize", "index_", "version"}
    screen = at_a_terminal({**environment, "COLUMNS": "60", "NO_COLOR": "1"}, "semantic", "list", PROJECT)[1]
    assert "path: documents/sharepoint/delta\r\n  purpose: index_version\r\n" in screen


async def test_every_command_works_over_nats_with_a_tenants_login_and_no_database(tmp_path: Path) -> None:
    isolation = isolate((), ["acme", "rogue"])
    isolation.write(tmp_path / "nats.conf")
    folder = tmp_path / "empty"
    folder.mkdir()
    async with (
        private_server(tmp_path / "nats.conf") as server,
        keyloft.open() as kv,
        SemanticStore(kv) as store,
    ):
        connection = await nats.connect(server.url, **isolation.service.options())

        async def run(*arguments: str, tenant: str = "acme") -> tuple[int, str, str]:
            user = isolation.tenants[tenant]
            environment = {**SURROUNDINGS, "KEYLOFT_NATS_PASSWORD": user.password}
            over = ("--nats", server.url, "--nats-user", user.name)
            return await asyncio.to_thread(
                partial(run_command, environment, "semantic", *arguments, *over, folder=folder)
            )

        assert (await run("get", FLAG))[::2] == (
            1,
            f"keyloft: NO_SERVICE: no service answers db.semantic.<tenant>.<project>.<operation> at {server.url}: "
            f"`keyloft serve --nats {server.url}` starts one there\n",
        )
        async with SemanticService(connection, store):
            entry = shown(await run("put", FLAG, "true", "--purpose", "feature_flag", "--writer", "console:x"))
            assert shown(await run("get", FLAG)) == entry
            assert shown(await run("list", PROJECT, "--values")) == entry
            code, stdout, stderr = await run("put", FLAG, "1", "--purpose", "config", "--expected-version", "0")
            assert (code, stdout, stderr.startswith("keyloft: VERSION_CONFLICT: ")) == (1, "", True)
            assert shown(await run("delete", FLAG)) == entry
            assert await run("get", FLAG) == (1, "", f"keyloft: there is no entry {FLAG}\n")
            assert shown(await run("restore", FLAG))["value"] is True
            trail = shown(await run("audit", FLAG))
            assert [record["action"] for record in trail] == ["put", "conflict", "delete", "restore"]
            assert shown(await run("audit", PROJECT, "--reverse", "--limit", "1")) == trail[-1]
            watching = asyncio.ensure_future(run("watch", f"{PROJECT}/flags/", "--limit", "2", "--values"))
            assert [change["key"] for change in await watched(watching, store)] == [FLAG, FLAG]
            async with store.lock(f"{PROJECT}/locks/sync", writer="w:sync") as lock:
                held = shown(await run("locks", PROJECT))
                assert (held["key"], held["fence"], held["value"]["holder"]) == (lock.key, lock.fence, "w:sync")
            assert await run("locks", PROJECT) == (0, "", "")
            for value in ("secret", "other"):
                with pytest.raises(Escalated):
                    await store.retrying(conflict_pauses=[]).run(
                        partial(store.put, FLAG, value, expected_version=7, writer="w", semantics=Semantics("config"))
                    )
            [first, second] = shown(await run("dead-letters", "list", PROJECT))
            assert first["operations"] == [{"action": "put", "key": FLAG, "expectedVersion": 7, "lastWriter": "w"}]
            retried = await run("dead-letters", "retry", PROJECT, first["id"], "--expected-version", "*")
            assert shown(retried)["value"] == "secret"
            assert (await run("dead-letters", "drop", PROJECT, second["id"], "--yes"))[0] == 0
            assert await run("dead-letters", "list", PROJECT) == (0, "", "")
            code, _, stderr = await run("get", FLAG, tenant="rogue")
            assert (code, stderr.startswith("keyloft: NOT_PERMITTED: ")) == (1, True)
            for wrong in (("--database", "x.db"), ("--purposes", "own"), ("--timeout", "0")):
                code, _, stderr = await run("get", FLAG, *wrong)
                assert (code, stderr.startswith(f"keyloft: {wrong[0]}: ")) == (2, True)
            assert (await run("get", "users/alice"))[0] == 2
        await connection.close()
    assert list(folder.iterdir()) == []
