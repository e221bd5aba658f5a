"""Who may use a cluster, over which connections, and which clusters are refused."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

import keyloft
from keyloft import CannotOpen, DiskFull, Unreachable, admin
from keyloft.engines import inspect_database
from keyloft.engines.etcd.cluster import refusal_of
from tools.etcd import NOT_INSTALLED, Node, is_installed, own_cluster, url_of

PASSWORD = "open@sesame"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Path]]:
    """A node that wants TLS and a login, whose user app may use the prefix app; and the file of its authority."""
    if not is_installed():
        pytest.skip(NOT_INSTALLED)
    folder = tmp_path_factory.mktemp("etcd")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    ca, cert, key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    authority.cert_pem.write_to_path(ca)
    certificate.private_key_pem.write_to_path(key)
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    with own_cluster(folder, 1, f"--cert-file={cert}", f"--key-file={key}") as [node]:
        of_prefix = {"key": _base64("app/"), "range_end": _base64("app0")}
        for path, body in (
            ("user/add", {"name": "root", "password": "root"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "app", "password": PASSWORD}),
            ("role/add", {"name": "app"}),
            ("role/grant", {"name": "app", "perm": {"permType": "READWRITE", **of_prefix}}),
            ("user/grant", {"user": "app", "role": "app"}),
            ("enable", {}),
        ):
            node.request(f"/v3/auth/{path}", json.loads(json.dumps(body)))
        yield node, ca


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def test_a_user_with_a_password_uses_its_prefix_over_tls(guarded: tuple[Node, Path]) -> None:
    node, ca = guarded
    url = f"etcd://app:open%40sesame@{node.client}/app?ca={ca}"
    async with keyloft.open(url, sweep_every=None) as kv:
        watch = kv.watch(("k",))
        assert not (await anext(watch))[0].exists
        await kv.set(("k",), 1)
        assert (await anext(watch))[0].value == 1
        assert "sesame" not in repr(kv)


@pytest.mark.parametrize(
    ("login", "prefix", "expected"),
    [
        ("app:wrong@", "app", "refuses this user or password"),
        ("", "app", "refuses this user"),
        ("app:open%40sesame@", "other", "refuses this user"),
    ],
)
async def test_a_user_without_rights_is_refused(
    guarded: tuple[Node, Path], login: str, prefix: str, expected: str
) -> None:
    node, ca = guarded
    with pytest.raises(CannotOpen, match=expected) as raised:
        await keyloft.open(f"etcd://{login}{node.client}/{prefix}?ca={ca}", patience=5)
    assert "sesame" not in str(raised.value)
    assert "wrong" not in str(raised.value)


async def test_a_server_that_no_trusted_authority_vouches_for_is_not_used(guarded: tuple[Node, Path]) -> None:
    node, _ = guarded
    with pytest.raises(Unreachable):
        await keyloft.open(f"etcd://app:open%40sesame@{node.client}/app?tls=true", patience=0.2)
    with pytest.raises(CannotOpen, match="ca=/nowhere can't be read"):
        await keyloft.open(f"etcd://{node.client}/app?ca=/nowhere")


def test_releases_that_can_lose_data_are_refused_by_name() -> None:
    assert [refusal_of(release) for release in ("3.4.0", "3.4.23", "3.5.3", "3.5.21", "3.6.0", "4.0.1")] == [None] * 6
    for release in ("3.5.0", "3.5.1", "3.5.2"):
        assert "can lose data: upgrade it to 3.5.3" in (refusal_of(release) or "")
    assert "needs 3.4" in (refusal_of("3.3.27") or "")


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[str]:
    """The URL of a node with a quota of 8 MiB."""
    if not is_installed():
        pytest.skip(NOT_INSTALLED)
    with own_cluster(tmp_path, 1, f"--quota-backend-bytes={8 * 1024 * 1024}") as nodes:
        yield url_of(nodes, "app")


async def test_a_full_cluster_refuses_writes_until_it_is_compacted(full_soon: str) -> None:
    async with keyloft.open(full_soon, sweep_every=None) as kv:

        async def fill() -> None:
            for _ in range(40):  # each replaces the one before, whose revision stays
                await kv.set(("k",), b"1" * 500_000)

        with pytest.raises(DiskFull, match="keyloft compact"):
            await fill()
        assert (await kv.get(("k",))).exists
        inspection = await inspect_database(full_soon)
        assert inspection is not None
        assert ["NOSPACE" in what for what, _ in inspection.obstacles] == [True]
        assert [finding.code for finding in (await admin.check(full_soon)).findings] == ["damage"]
        await admin.compact(full_soon)
        await kv.set(("k",), 2)
        assert (await admin.check(full_soon)).findings == ()
