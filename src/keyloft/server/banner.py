"""What `keyloft serve` prints once it runs: addresses, and two commands to try; a log line where logs are JSON."""

import contextlib
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import keyloft
from keyloft.core.addresses import without_login
from keyloft.core.urls import DatabaseUrl
from keyloft.nats.connection import Login
from keyloft.plugins.rules import PREFIXES
from keyloft.server.config import DEFAULT_NATS_PORT, Config
from keyloft.server.http_service import HttpService

logger = logging.getLogger(__name__)


def show_banner(config: Config, addresses: Sequence[str], http: HttpService) -> None:
    """Print the addresses of a service to standard error, beside its log; nothing reads its standard output.

    Args:
        config: The settings of the service.
        addresses: Those of NATS, perhaps of the nats-server that the service runs itself.
        http: Its HTTP server.
    """
    pages = http.address
    nats = [without_login(address) for address in addresses]
    if config.log_format == "json":
        where = {
            "database": database_name(config.database),
            "nats": nats,
            "metrics": None if pages is None else f"{pages}/metrics",
            "health": None if pages is None else f"{pages}/healthz",
            "api": f"{pages}/v1" if pages is not None and http.has_api else None,
            "page": f"{pages}/page" if pages is not None and http.has_page else None,
        }
        if http.made_token is not None:
            where["token"] = http.made_token
        logger.info("Keyloft %s is running", keyloft.__version__, extra=where)
        return
    shown = http.absence if pages is None else f"{pages}/metrics, health at {pages}/healthz"
    api = ""
    if pages is not None and http.has_api:
        made = http.made_token
        api = f"  API       {pages}/v1{f' with the token {made}' if made and not http.has_page else ''}\n"
        if http.has_page:
            api += f"  page      {pages}/{f'?token={made}' if made else 'page'}\n"
    needs_login = config.login() != Login() or any("@" in address for address in addresses)
    with contextlib.suppress(OSError):  # the terminal is closed
        sys.stderr.write(_text(config, nats, shown, api, needs_login))
        sys.stderr.flush()


def _text(config: Config, nats: Sequence[str], metrics: str, api: str, needs_login: bool) -> str:
    options = ""
    if nats != [f"nats://127.0.0.1:{DEFAULT_NATS_PORT}"]:
        options += f" --nats {shlex.quote(','.join(nats))}"
    if PREFIXES[0] not in config.prefixes:
        options += f" --subjects {config.prefixes[0]}"
    login = "; with the login of a user that may do so, see keyloft plugin get --help" if needs_login else ""
    return f"""\
Keyloft {keyloft.__version__} is running.

  data      {database_name(config.database)}
  NATS      {", ".join(nats)}{"" if config.nats else " (started by this service)"}
  metrics   {metrics}
{api}
Store a first value and read it, in another terminal{login}:

  {_command()} plugin set{options} trivia score 100
  {_command()} plugin get{options} trivia score

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
