"""The command `open`: opens the admin page of a running service in a browser."""

import json
import os
import platform
import ssl
import urllib.error
import urllib.request
import webbrowser
from typing import Any, Final

from keyloft import limits
from keyloft.cli.options import Commands, Settings
from keyloft.cli.terminal import CommandFailed, remark, say
from keyloft.core.addresses import address_url
from keyloft.server.config import Config

_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of a machine's, and the address at which such a service is reached on this machine."""


class PageSettings(Settings, frozen=True, kw_only=True):
    """Where the page is, and a token for it."""

    names = ("http", "http_token", "http_cert")


def open_(*, settings: PageSettings) -> None:
    """Open the admin page of a running service in a browser. Without a browser, print the link.

    With the token of KEYLOFT_HTTP_TOKEN, you are logged in by a code that is valid once, for a minute. Without it, the
    page asks for a token: the one that the service printed at its start, or one that `keyloft token new` made.

    Example: keyloft open
    """
    config = settings.config()
    base = _base(config)
    path = "/page" if config.http_token is None else _code(base, config)
    _check_page(base, config)
    if not (_has_browser() and webbrowser.open(base + path)):
        remark("No browser can be opened here. The page is at:")
    say(base + path)


def _base(config: Config) -> str:
    address = config.http_address()
    if address is None:
        raise CommandFailed("--http is off, so there is no page")
    host, port = address
    return address_url(_EVERYWHERE.get(host, host), port, "http" if config.http_cert is None else "https")


def _check_page(base: str, config: Config) -> None:
    answer = _request(urllib.request.Request(f"{base}/page/login"), config)
    if answer is None:
        raise CommandFailed(
            f"the service at {base} has no page: start it with a token (KEYLOFT_HTTP_TOKEN; scripts/serve makes one), "
            "and without --http-page off"
        )


def _code(base: str, config: Config) -> str:
    """The path that logs in once."""
    bearer = {"authorization": f"Bearer {config.http_token}"}
    body = _request(urllib.request.Request(f"{base}/page/code", b"", bearer, method="POST"), config)
    if body is None:
        return "/page"
    path: str = json.loads(body)["path"]
    return path


def _request(request: urllib.request.Request, config: Config) -> bytes | None:
    """The body of an answer; None if there is nothing at that path."""
    options: dict[str, Any] = {}
    if config.http_cert is not None:
        options["context"] = ssl.create_default_context(cafile=config.http_cert)
    try:
        with urllib.request.urlopen(request, timeout=limits.OPEN_PAGE_SECONDS, **options) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        if error.code == 401:
            raise CommandFailed("the service does not know this token (KEYLOFT_HTTP_TOKEN)") from None
        raise CommandFailed(f"the service answered {error.code} {error.reason}") from None
    except OSError as error:
        base, reason = request.full_url.rpartition("/page")[0], getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise CommandFailed(
                f"the service at {base} has a certificate that is not trusted: {reason.verify_message}. Name a file as "
                "--http-cert that holds the certificate and that of its authority, and the host with --http as the "
                "certificate does"
            ) from None
        raise CommandFailed(
            f"no service answers at {base}: {reason}. Start one with `keyloft serve`, or name the address of one that "
            "runs with --http"
        ) from None


def _has_browser() -> bool:
    """Whether a window can be opened: a browser for terminals would hide the link."""
    if platform.system() == "Linux" and not {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & os.environ.keys():
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


COMMANDS: Final[Commands] = (open_,)
