"""Keys and their rules: whatever breaks one is refused, with the field and the rule named."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyloft import InvalidKey
from keyloft.errors import InvalidInput, KeyTooLarge
from keyloft.semantic import SemanticStore, key_of, shortened
from keyloft.semantic.keys import EntryKey, key_of_row, parse, parse_prefix

from .entries import KEY, PROJECT, delete, put, trail

WORDS = st.text("abz019._-", min_size=1, max_size=9)
IDS = st.text("abz019_-", min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("", "tenant/<tenant>/project/<project>/<path>"),
        ("docs/delta", "tenant/<tenant>/project/<project>/<path>"),
        ("/tenant/a/project/b/c", "tenant/<tenant>/project/<project>/<path>"),
        ("tenants/a/project/b/c", "tenant/<tenant>/project/<project>/<path>"),
        ("tenant/a/projects/b/c", "tenant/<tenant>/project/<project>/<path>"),
        ("tenant/a/project/b", "tenant/<tenant>/project/<project>/<path>"),
        ("tenant/a/project/b/", "got ''"),
        ("tenant/a/project/b//c", "got ''"),
        ("tenant/a/project/b/c/", "got ''"),
        ("tenant//project/b/c", "expected a tenant of 1 to 64 lowercase"),
        ("tenant/a.b/project/b/c", "expected a tenant of 1 to 64 lowercase"),
        ("tenant/Acme/project/b/c", "expected a tenant of 1 to 64 lowercase"),
        ("tenant/a\n/project/b/c", "expected a tenant of 1 to 64 lowercase"),
        ("tenant/a/project//c", "expected a project of 1 to 64 lowercase"),
        ("tenant/a/project/b.c/d", "expected a project of 1 to 64 lowercase"),
        ("tenant/a/project/b*/d", "expected a project of 1 to 64 lowercase"),
        ("tenant/" + 65 * "a" + "/project/b/c", "expected a tenant of 1 to 64 lowercase"),
        ("tenant/a/project/" + 65 * "b" + "/c", "expected a project of 1 to 64 lowercase"),
        ("tenant/a/project/b/Delta", "got 'Delta'"),
        ("tenant/a/project/b/a b", "got 'a b'"),
        ("tenant/a/project/b/c\n", r"got 'c\n'"),
        ("tenant/a/project/b/c\x00d", r"got 'c\x00d'"),
        ("tenant/a/project/b/é", r"got '\xe9'"),
        ("tenant/a/project/b/١", r"got '\u0661'"),
        ("tenant/a/project/b/\ud800", r"got '\ud800'"),
        ("tenant/a/project/b/c:d", "got 'c:d'"),
    ],
)
def test_a_key_that_breaks_a_rule_is_refused_by_name(key: str, rule: str) -> None:
    with pytest.raises(InvalidKey, match=f"^key: .*{re.escape(rule)}"):
        parse(key)


def test_a_key_has_at_most_128_characters() -> None:
    longest = f"{PROJECT}/".ljust(128, "x")
    assert parse(longest).key == longest
    with pytest.raises(KeyTooLarge, match=r"^key: expected at most 128 characters, got 129; .*shortened"):
        parse(longest + "x")


@pytest.mark.parametrize("key", [None, 7, b"tenant/a/project/b/c", ["tenant"], ("tenant", "a")])
def test_a_key_that_is_no_str_is_a_type_error(key: Any) -> None:
    with pytest.raises(TypeError, match=r"^key: .*, got "):
        parse(key)


@pytest.mark.parametrize(
    "prefix", ["", "tenant/a", "tenant/a/project", "tenant/a/project/", "tenant/a./project/b", "tenant/A/project/b/"]
)
def test_a_prefix_without_a_whole_tenant_and_project_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidKey, match=r"^prefix: "):
        parse_prefix(prefix)


@pytest.mark.parametrize("path", ["//", "a//b", "/a", "A", "a b", "a*", "x" * 128, "\x00", "\ud800"])
def test_a_prefix_with_which_no_path_begins_is_refused(path: str) -> None:
    with pytest.raises(InvalidKey, match=r"^prefix: "):
        parse_prefix(f"{PROJECT}/{path}")


async def test_every_call_refuses_a_bad_key(store: SemanticStore) -> None:
    bad = f"{PROJECT}/Bad"
    for asked in (put(store, bad), delete(store, bad), store.get(bad), store.restore(bad, writer="w")):
        with pytest.raises(InvalidKey, match=r"^key: "):
            await asked
    for ask in (store.watch, store.list, store.changes, store.audit):
        with pytest.raises(InvalidKey, match=r"^(key|prefix|about): "):
            ask(bad)


@given(IDS, IDS, st.lists(WORDS, min_size=1, max_size=3))
def test_a_key_is_put_together_taken_apart_and_found_again_in_its_row(
    tenant: str, project: str, parts: list[str]
) -> None:
    key = key_of(tenant, project, *parts)
    at = parse(key)
    assert (at.project.tenant, at.project.name, at.path) == (tenant, project, "/".join(parts))
    assert key_of_row(at.entry) == key
    start, end = parse_prefix(key).entries
    assert start <= at.entry < end


@given(st.lists(st.builds(key_of, IDS, IDS, WORDS, WORDS), min_size=2, max_size=2, unique=True))
def test_rows_of_different_keys_never_meet(keys: list[str]) -> None:
    def rows(at: EntryKey) -> set[bytes]:
        return {at.entry, at.deleted, at.audit_index, at.conflicts, at.request("r")}

    one, other = map(parse, keys)
    assert not rows(one) & rows(other)
    assert len(rows(one)) == 5
    same_project = one.project == other.project
    assert (
        (one.project.audit_log == other.project.audit_log)
        == (one.project.fences == other.project.fences)
        == same_project
    )


@pytest.mark.parametrize("parts", [(), ("",), ("a", ""), ("/a",), ("A",)])
def test_key_of_refuses_what_makes_no_key(parts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidKey, match=r"^parts: "):
        key_of("acme", "web", *parts)


def test_key_of_lets_no_tenant_reach_into_another() -> None:
    with pytest.raises(InvalidKey, match=r"^tenant: expected 1 to 64 lowercase"):
        key_of("acme/project/web/x", "web", "a")
    with pytest.raises(InvalidKey, match=r"^project: expected 1 to 64 lowercase"):
        key_of("acme", "web/x", "a")


@given(st.text(min_size=1, max_size=300))
def test_shortened_makes_a_part_of_whatever_text(identifier: str) -> None:
    part = shortened(identifier)
    assert len(part) <= 49
    assert parse(f"{PROJECT}/{part}/last_sha").path == f"{part}/last_sha"
    assert shortened(identifier) == part


@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
def test_shortened_keeps_different_identifiers_apart(identifiers: list[str]) -> None:
    one, other = identifiers
    assert shortened(one) != shortened(other)


def test_shortened_is_the_same_for_ever() -> None:
    part = shortened("https://github.com/Acme/A-Very-Long-Name")
    assert part == "https-github.com-acme-a.fc8d730e91b7c264ea7f09c1"


@pytest.mark.parametrize("identifier", ["", None, 7, b"x", "\ud800"])
def test_shortened_refuses_what_is_no_text(identifier: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^identifier: "):
        shortened(identifier)


async def test_shorten_records_which_identifier_it_was(store: SemanticStore) -> None:
    identifier = "https://github.com/Acme/" + 500 * "é"
    part = await store.shorten("acme", "web", identifier, writer="indexer")
    assert part == shortened(identifier)
    assert await store.shorten("acme", "web", identifier, writer="indexer") == part
    assert await store.identifier("acme", "web", part) == identifier
    assert await store.identifier("acme", "shop", part) is None
    assert len(await trail(store, key_of("acme", "web", "identifiers", part))) == 1, "it is recorded once"


async def test_a_key_of_dots_is_a_key_like_any_other(store: SemanticStore) -> None:
    for path in (".", "..", "../..", "-", "_"):
        await put(store, f"{PROJECT}/{path}", path)
    assert [entry.value for entry in await store.list(PROJECT, values=True)] == ["-", ".", "..", "../..", "_"]
    assert await store.get(KEY) is None
