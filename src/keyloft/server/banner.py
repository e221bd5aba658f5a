"""What `keyloft serve` prints once it runs: addresses, and two commands to try. As a log line where logs are JSON."""

import contextlib
import logging
import os
import shlex
import shutil
import sys
from pathlib import Path

from msgspec import Struct

import keyloft
from keyloft.core.urls import DatabaseUrl, without_login
from keyloft.nats.connection import Login
from keyloft.plugins.client import PREFIX
from keyloft.server.config import DEFAULT_NATS_PORT, Config

logger = logging.getLogger(__name__)


class Banner(Struct, frozen=True, kw_only=True):
    """Where a service can be reached."""

    config: Config
    nats: list[str]
    """The addresses of NATS; without any in `config`, that of the nats-server which the service runs itself."""
    pages: str | None
    """The address of metrics and health."""

    def show(self) -> None:
        """Print it to standard error, which has the log, too; nothing reads a service's standard output."""
        if self.config.log_format == "json":
            logger.info(
                "Keyloft %s is running",
                keyloft.__version__,
                extra={
                    "database": database_name(self.config.database),
                    "nats": [without_login(address) for address in self.nats],
                    "metrics": None if self.pages is None else f"{self.pages}/metrics",
                    "health": None if self.pages is None else f"{self.pages}/healthz",
                },
            )
            return
        with contextlib.suppress(OSError):  # the terminal is closed
            sys.stderr.write(self._text())
            sys.stderr.flush()

    def _text(self) -> str:
        nats = ",".join(map(without_login, self.nats))
        command = _command()
        options = ""
        if nats != f"nats://127.0.0.1:{DEFAULT_NATS_PORT}":
            options += f" --nats {shlex.quote(nats)}"
        if PREFIX not in self.config.prefixes:
            options += f" --subjects {self.config.prefixes[0]}"
        needs_login = self.config.login() != Login() or any("@" in url for url in self.nats)
        login = "; with the login of a user that may do so, see keyloft plugin get --help" if needs_login else ""
        pages = "off" if self.pages is None else f"{self.pages}/metrics, health at {self.pages}/healthz"
        return f"""\
Keyloft {keyloft.__version__} is running.

  data      {database_name(self.config.database)}
  NATS      {nats.replace(",", ", ")}{"" if self.config.nats else " (started by this service)"}
  metrics   {pages}

Store a first value and read it, in another terminal{login}:

  {command} plugin set{options} trivia score 100
  {command} plugin get{options} trivia score

Ctrl-C ends it.
"""


def _command() -> str:
    """How this program is called in another terminal, where no virtual environment is active."""
    beside = Path(sys.executable).with_name("keyloft")
    found = shutil.which("keyloft")
    if found is not None and "VIRTUAL_ENV" not in os.environ and Path(found).resolve() == beside.resolve():
        return "keyloft"
    return shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m keyloft"


def database_name(database: str) -> str:
    """The file, or the URL without its password."""
    url = DatabaseUrl.parse(database)
    if url.is_in_memory:
        return "in memory: it is gone when the service ends"
    return url.shown if url.file is None else str(url.file)
