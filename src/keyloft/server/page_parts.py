"""Collects what the admin page shows of a service: its parts, its settings, the file of its database."""

from contextlib import suppress
from typing import Any

from keyloft.core.urls import DatabaseUrl
from keyloft.errors import KeyloftError
from keyloft.http.page.service import ServiceParts
from keyloft.server.config import Config
from keyloft.server.shown_settings import shown_settings


def page_parts(config: Config, **parts: Any) -> ServiceParts:
    """What the page shows: the parts of the service, its settings without secrets, and the file of its database."""
    file = None
    with suppress(KeyloftError):  # a URL that can't be used is refused when the database is opened
        file = DatabaseUrl.parse(config.database).file
    return ServiceParts(
        settings=shown_settings(config),
        database_file=file,
        is_read_only=config.http_page == "read-only",
        **parts,
    )
