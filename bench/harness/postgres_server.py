"""The PostgreSQL server that a benchmark measures on."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct

from tools import postgres


class MeasuredServer(Struct, frozen=True):
    """A server to measure on."""

    url: str
    is_named: bool
    """Whether the environment names it: its disk may be another machine's."""

    def software(self) -> dict[str, str]:
        """Versions and settings on which the figures depend.

        Raises:
            SystemExit: The server does not wait for the disk, so its figures would mean nothing.
        """
        names = ("server_version", "fsync", "synchronous_commit", "wal_sync_method", "shared_buffers")
        settings = {name: postgres.query(self.url, f"SHOW {name}")[0][0] for name in names}
        if settings["fsync"] != "on" or settings["synchronous_commit"] == "off":
            raise SystemExit(
                "this server acknowledges commits before they are on disk: set fsync and synchronous_commit"
            )
        shown = ", ".join(f"{name} {setting}" for name, setting in settings.items() if name != "server_version")
        return {
            "server": f"PostgreSQL {settings['server_version']}, {shown}",
            "asyncpg": version("asyncpg"),
            "uvloop": version("uvloop"),
        }


@contextmanager
def serving(folder: Path) -> Iterator[MeasuredServer]:
    """The server that KEYLOFT_TEST_POSTGRES names, or a new one with its files in this folder."""
    if named := postgres.named_server():
        yield MeasuredServer(named, is_named=True)
        return
    folder.chmod(0o711)  # the server may have to run as another user
    with postgres.own_server(durable=True, within=folder) as url:
        yield MeasuredServer(url, is_named=False)
