"""Who may use a cluster, over which connections, and which clusters are refused."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

import keyloft
from keyloft import CannotOpen, DatabaseError, DiskFull, Unreachable, admin
from keyloft.engines import inspect_database
from keyloft.engines.etcd.cluster import refusal_of
from tools.etcd import NOT_INSTALLED, Node, is_installed, own_cluster, url_of

PASSWORD = "open@sesame"
LOGIN = "etcd://app:open%40sesame@"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, str]]:
    """A node that wants TLS, a certificate and a login, whose user app may use the prefix app; and options of a URL."""
    if not is_installed():
        pytest.skip(NOT_INSTALLED)
    folder = tmp_path_factory.mktemp("etcd")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "etcd.example")
    ca, cert, key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    authority.cert_pem.write_to_path(ca)
    certificate.private_key_pem.write_to_path(key)
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    tls = (f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={ca}", "--client-cert-auth")
    with own_cluster(folder, 1, *tls) as [node]:
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
            node.request(f"/v3/auth/{path}", body)
        yield node, f"ca={ca}&cert={cert}&key={key}"


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def test_a_user_with_a_password_uses_its_prefix_over_tls(guarded: tuple[Node, str]) -> None:
    node, options = guarded
    async with keyloft.open(f"{LOGIN}{node.client}/app?{options}", sweep_every=None) as kv:
        watch = kv.watch(("k",))
        assert not (await anext(watch))[0].exists
        await kv.set(("k",), 1)
        assert (await anext(watch))[0].value == 1
        assert "sesame" not in repr(kv)
        # Logins don't survive a restart: the engine logs in again, its watch, too.
        await asyncio.to_thread(node.stop)
        node.start([node])
        await asyncio.to_thread(node.wait_until_ready)
        await kv.set(("k",), 2)
        assert (await anext(watch))[0].value == 2


async def test_operators_of_a_prefix_need_no_further_right_but_to_compact(
    guarded: tuple[Node, str], tmp_path: Path
) -> None:
    node, options = guarded
    url = f"{LOGIN}{node.client}/app?{options}"
    async with keyloft.open(url, sweep_every=None) as kv:
        await kv.set(("k",), 1)
    assert (await admin.check(url)).findings == ()
    assert (await admin.stats(url)).total.entries == 1
    assert (await admin.backup(url, tmp_path / "backup.db")).rows == 1
    assert await inspect_database(url) is not None
    with pytest.raises(CannotOpen, match="the role root to compact"):
        await admin.compact(url)
    for _ in range(2):  # also if nothing was written since
        await admin.compact(f"etcd://root:root@{node.client}/app?{options}")


@pytest.mark.parametrize(
    ("login", "prefix", "expected"),
    [
        ("app:wrong@", "app", "refuses this user or password"),
        ("", "app", "refuses this user"),
        ("app:open%40sesame@", "other", "refuses this user"),
    ],
)
async def test_a_user_without_rights_is_refused(
    guarded: tuple[Node, str], login: str, prefix: str, expected: str
) -> None:
    node, options = guarded
    with pytest.raises(CannotOpen, match=expected) as raised:
        await keyloft.open(f"etcd://{login}{node.client}/{prefix}?{options}", patience=5)
    assert "sesame" not in str(raised.value)
    assert "wrong" not in str(raised.value)


async def test_a_server_that_no_trusted_authority_vouches_for_is_not_used(guarded: tuple[Node, str]) -> None:
    node, options = guarded
    ca, _ = options.split("&", 1)
    elsewhere = node.client.replace("127.0.0.1", "localhost")  # the certificate does not have this name
    with pytest.raises(Unreachable):
        await keyloft.open(f"{LOGIN}{elsewhere}/app?{options}", patience=0.2)
    for wrong in ("tls=true", ca, f"{options}&server_name=other.example"):
        with pytest.raises(Unreachable, match="no TLS connection was made: check ca, cert, key and server_name"):
            await keyloft.open(f"{LOGIN}{node.client}/app?{wrong}", patience=0.2)
    with pytest.raises(Unreachable, match="if they use TLS, the URL needs tls=true"):
        await keyloft.open(f"{LOGIN}{node.client}/app", patience=0.2)
    await (await keyloft.open(f"{LOGIN}{elsewhere}/app?{options}&server_name=etcd.example")).aclose()
    with pytest.raises(CannotOpen, match="ca=/nowhere can't be read"):
        await keyloft.open(f"etcd://{node.client}/app?ca=/nowhere")


async def test_files_that_hold_no_certificate_are_named_at_once(guarded: tuple[Node, str]) -> None:
    node, options = guarded
    ca, _, key = [option.partition("=")[2] for option in options.split("&")]
    for wrong, expected in (
        (f"ca={key}", f"ca={key} holds no certificates"),
        (f"ca={ca}&cert={key}&key={key}", f"cert={key} and key={key} are not a certificate and its private key"),
        (f"ca={ca}&cert={ca}&key={key}", f"cert={ca} and key={key} are not a certificate and its private key"),
    ):
        with pytest.raises(CannotOpen, match=expected):
            await keyloft.open(f"{LOGIN}{node.client}/app?{wrong}")


def test_releases_that_can_lose_data_are_refused_by_name() -> None:
    assert [refusal_of(release) for release in ("3.4.0", "3.4.23", "3.5.3", "3.5.21", "3.6.0", "4.0.1")] == [None] * 6
    for release in ("3.5.0", "3.5.1", "3.5.2"):
        assert "can lose data: upgrade it to 3.5.3" in (refusal_of(release) or "")
    assert "needs 3.4" in (refusal_of("3.3.27") or "")


@pytest.fixture
def full_soon(server_folder: Path) -> Iterator[Node]:
    """A node with a quota of 8 MiB."""
    if not is_installed():
        pytest.skip(NOT_INSTALLED)
    with own_cluster(server_folder, 1, f"--quota-backend-bytes={8 * 1024 * 1024}") as [node]:
        yield node


async def alarms_in(url: str) -> list[str]:
    """What doctor learns of alarms."""
    inspection = await inspect_database(url)
    assert inspection is not None
    return [what for what, _ in inspection.obstacles]


async def test_a_full_or_damaged_cluster_refuses_writes_and_says_what_to_do(full_soon: Node) -> None:
    url = url_of([full_soon], "app")
    async with keyloft.open(url, sweep_every=None) as kv:

        async def fill() -> None:
            # Each replaces the one before, whose revision stays. etcd learns its size by and by.
            for _ in range(400):
                await kv.set(("k",), b"1" * 500_000)

        with pytest.raises(DiskFull, match="keyloft compact"):
            await fill()
        assert (await kv.get(("k",))).exists
        [full] = await alarms_in(url)
        assert "NOSPACE" in full
        assert [finding.code for finding in (await admin.check(url)).findings] == ["damage"]
        await admin.compact(url)
        await kv.set(("k",), 2)
        assert (await admin.check(url)).findings == ()

        alarm = {"memberID": "1", "alarm": "CORRUPT"}
        full_soon.request("/v3/maintenance/alarm", {"action": "ACTIVATE", **alarm})
        with pytest.raises(DatabaseError, match=r"CORRUPT.*replace that member.*etcdctl alarm disarm"):
            await kv.set(("k",), 3)
        [damaged] = await alarms_in(url)
        assert "CORRUPT" in damaged
        full_soon.request("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
        assert (await kv.get(("k",))).value == 2


@pytest.fixture
def two_clusters(server_folder: Path) -> Iterator[tuple[Node, Node]]:
    """The only members of two clusters."""
    if not is_installed():
        pytest.skip(NOT_INSTALLED)
    (server_folder / "other").mkdir()
    with own_cluster(server_folder) as [node], own_cluster(server_folder / "other") as [other]:
        yield node, other


async def test_a_member_that_was_set_up_as_another_cluster_is_not_used(two_clusters: tuple[Node, Node]) -> None:
    node, other = two_clusters
    both = url_of([node, other], "app")
    with pytest.raises(CannotOpen, match=f"different clusters: {node.client}, {other.client}"):
        await keyloft.open(both)
    await asyncio.to_thread(other.kill)
    async with keyloft.open(both, sweep_every=None, patience=0.5) as kv:
        await kv.set(("k",), 1)
        other.start([other])
        await asyncio.to_thread(other.wait_until_ready)
        await asyncio.to_thread(node.kill)
        with pytest.raises(Unreachable):
            await kv.get(("k",))
        node.start([node])
        await asyncio.to_thread(node.wait_until_ready)
        async with asyncio.timeout(60):
            while True:
                try:
                    assert (await kv.get(("k",))).value == 1
                    break
                except Unreachable:
                    continue
