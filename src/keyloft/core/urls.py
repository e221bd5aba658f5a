"""URLs of databases and buses, as they may be shown to anybody."""

import re

_QUERY_PASSWORD = re.compile(r"([?&](?:ssl)?password=)[^&]*")


def without_password(url: str) -> str:
    """A URL that can be logged: without whoever logs in there, and without a password among its options."""
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        return url
    end = min([at for at in (rest.find("/"), rest.find("?")) if at >= 0], default=len(rest))
    options = _QUERY_PASSWORD.sub(r"\g<1>…", rest[end:])
    return f"{scheme}{slashes}{rest[:end].rpartition('@')[2]}{options}"


def sqlite_path(database: str) -> str | None:
    """The file that a path or URL of SQLite names; None for anything else, memory included."""
    scheme, slashes, rest = database.partition("://")
    if not slashes:
        return None if database == ":memory:" else database
    if scheme.partition("+")[0].lower() != "sqlite" or rest in ("", "/:memory:", "/"):
        return None
    return rest.removeprefix("/")
