"""URLs: the one parser of database URLs that engines, migrations, service, commands and doctor share.

    None, :memory:, memory://                      in memory
    app.db, ~/app.db, /srv/app.db, Path("app.db")  an SQLite file
    sqlite:///app.db, sqlite:////srv/app.db        the same: three slashes and a relative path, four and an absolute one
    sqlite:///app.db?mode=ro                       the same, opened read-only
    sqlite:///app.db?mode=ro&immutable=1           the same on a read-only medium, where no process writes the file
    sqlite://, sqlite:///:memory:                  SQLite in memory
    postgresql://user:password@host:port/database  PostgreSQL, with hosts and options as libpq has them
    etcd://user:password@host:port,host,host/name  etcd: some of its members, and the prefix of all keys; options below
    https://host:port, https://host/db/name        the HTTP API of a running service, and one of its named stores

Options of PostgreSQL that are Keyloft's own: `reads=standby` and `max_lag=SECONDS`.

Options of etcd: `tls=true`, or any of `ca=FILE`, `cert=FILE`, `key=FILE` and `server_name=NAME`, which turn TLS on.

Option of https: `ca=FILE`, the certificates of the authorities that are trusted.

Schemes may be written in capitals, and name a driver as in `postgresql+asyncpg://`, which is ignored.

A text that can't be parsed may hold a password anywhere: no message quotes more of it than its scheme.
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from keyloft.core.files import absolute_path
from keyloft.errors import CannotOpen, InvalidArgument, KeyloftError

AnyUrl: TypeAlias = "str | os.PathLike[str] | DatabaseUrl | None"

_USE: Final = (
    "write a path, sqlite:///path, postgresql://user:password@host/database, etcd://host,host/prefix, "
    "https://host:port or :memory:"
)
_SCHEME: Final = re.compile(r"([a-z][a-z0-9.-]*)(?:\+[a-z0-9_.+-]*)?:(//)?", re.IGNORECASE)
_KNOWN: Final = ("sqlite", "file", "postgresql", "postgres", "etcd", "http", "https", "memory")
_HOST_AND_PORT: Final = re.compile(
    r"(?:[a-z0-9-]+(?:\.[a-z0-9-]+)*|\[[0-9a-f:]+\]):[0-9]{2,5}(?:/[a-z0-9._/-]*)?", re.I
)
# A scheme, a login beside a host, or libpq's name=value; what begins with /x, ./, ../ or ~ is a path.
_LOGIN: Final = re.compile(
    r".*://|(?!/[^/]|\.{1,2}/|~)(?:[^@]*(?::[^@]*@|@[^@]*:)|.*\b(?:password|pwd|dbname|host)\s*=)", re.I | re.S
)
_ESCAPE: Final = (
    "in the URL of a server, every character of a user, password, database or prefix that is neither a letter nor a "
    "digit is percent-encoded: @ is %40, / is %2F, : is %3A, # is %23, ? is %3F"
)
_OWN_OPTIONS: Final = re.compile(r"(?<=[?&])(?:reads|max_lag)=[^&]*&?")
_SQLITE_OPTIONS: Final = ("mode=ro", "immutable=1")
_SQLITE_QUERY: Final = re.compile(r"\?(?:mode|immutable)=[\w&=]*$")
_READ_ONLY: Final = "sqlite:///app.db?mode=ro"
_ETCD_USE: Final = "an etcd URL is written etcd://user:password@host,host,host/prefix"
_ETCD_OPTIONS: Final = ("tls", "ca", "cert", "key", "server_name")
_ETCD_PORT: Final = 2379
_ETCD_PREFIX: Final = "keyloft"
_HTTP_USE: Final = "the URL of a service is written https://host:port, or https://host:port/db/name for a named store"
_HTTP_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s,:\[\]]+)(?::([0-9]{1,5}))?", re.ASCII)
_HTTP_PATH: Final = re.compile(r"((?:/[A-Za-z0-9._~-]+)*?)(?:/v1(?:/kv)?)?(?:/db/([A-Za-z0-9._-]+))?/?")
_SECRET_OPTION: Final = re.compile(r"([^=&]*(?:pass|pwd|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)


class DatabaseUrl(Struct, frozen=True, kw_only=True):
    """The database that a path or URL names. It is safe to print: `shown` and the repr have no user and no password."""

    engine: Literal["memory", "sqlite", "postgres", "etcd", "http"]
    shown: str
    """The path or URL as it was written, without user and password."""
    path: str = ":memory:"
    """The SQLite file, as an absolute path, so that a later change of the working directory has no effect."""
    read_only: bool = False
    immutable: bool = False
    """Whether no process writes the SQLite file while it is open."""
    postgres: "PostgresAddress | None" = None
    etcd: "EtcdAddress | None" = None
    http: "HttpAddress | None" = None

    @classmethod
    def parse(cls, url: AnyUrl) -> "DatabaseUrl":
        """Parse a path or URL; a `DatabaseUrl` is returned as it is.

        Raises:
            InvalidArgument: It is not a path or URL; the message says how to write it.
            CannotOpen: No engine is known for its scheme, or the home folder that it names does not exist.
        """
        if isinstance(url, DatabaseUrl):
            return url
        try:
            text = ":memory:" if url is None else os.fspath(url)
            is_named = bool(os.fsencode(text)) and "\x00" not in text
        except (TypeError, UnicodeEncodeError):  # a TypeError also for bytes
            is_named = False
        if not is_named:
            got = f", got {type(url).__name__}" if not isinstance(url, str) else ""
            raise InvalidArgument(f"a database is named by a path or a URL{got}; leave it out for one in memory")
        if text == ":memory:":
            return cls(engine="memory", shown=text)
        found = _SCHEME.match(text)
        if found is not None and (found[2] or found[1].lower() in _KNOWN):
            return _parse_url(found[1].lower(), text[: found.end()], text[found.end() :])
        _check_path(text)
        if isinstance(url, str) and _SQLITE_QUERY.search(text):
            raise InvalidArgument(
                f"a path takes no options: write sqlite:///{_quoted(text)}, or pass a Path for a file of that name"
            )
        return cls(engine="sqlite", shown=text, path=absolute_path(text))

    @property
    def file(self) -> Path | None:
        """The SQLite file; None for any other database."""
        return Path(self.path) if self.engine == "sqlite" and self.path != ":memory:" else None

    @property
    def is_in_memory(self) -> bool:
        return self.engine in ("memory", "sqlite") and self.file is None

    def __repr__(self) -> str:
        return f"DatabaseUrl({self.shown!r})"


class PostgresAddress(Struct, frozen=True, kw_only=True):
    """Where a PostgreSQL database is, and who logs in there."""

    dsn: str
    """What asyncpg connects to, with the password."""
    shown: str
    """The URL with the user and without the password, for commands that an operator can copy from a message."""
    name: str
    """Hosts and database, for messages."""
    hosts: tuple[Mapping[str, Any], ...]
    """Host and port of each of several hosts, as asyncpg takes them; for one host, an empty mapping: the DSN has it."""
    options: Mapping[str, str]
    reads: str | None = None
    """The option `reads`: "primary" or "standby"."""
    max_lag: float | None = None
    """The option `max_lag`, in seconds."""
    secrets: tuple[str, ...]
    """The passwords, which a driver's message might quote."""

    def __repr__(self) -> str:
        return f"PostgresAddress({self.name!r})"


class EtcdAddress(Struct, frozen=True, kw_only=True):
    """Where an etcd cluster is, which of its keys a store has, and who logs in there."""

    endpoints: tuple[str, ...]
    """Members of the cluster, as host:port."""
    prefix: str
    """All keys begin with this prefix and a slash."""
    name: str
    """Members and prefix, for messages."""
    tls: bool = False
    ca: str | None = None
    """A file with the certificates of the authorities that are trusted; None for those that gRPC brings."""
    cert: str | None = None
    """A file with this client's certificate chain; `key` is its private key."""
    key: str | None = None
    server_name: str | None = None
    """The name in the members' certificates, if it is not that of their host."""
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"EtcdAddress({self.name!r})"


class HttpAddress(Struct, frozen=True, kw_only=True):
    """Where the HTTP API of a service is, and which of its tuple stores is meant."""

    origin: str
    """Scheme, host and port, and perhaps a path that a proxy adds before that of the API: `https://host/keyloft`."""
    store: str | None = None
    """The name of the store; None for the unnamed one."""
    ca: str | None = None
    """A file with the certificates of the authorities that are trusted; None for those of this machine."""

    @property
    def name(self) -> str:
        """For messages."""
        return self.origin if self.store is None else f"{self.origin}/db/{self.store}"

    def named(self, store: str | None) -> "HttpAddress":
        """The same service, and the store that a caller named besides the URL.

        Raises:
            InvalidArgument: The URL names another one.
        """
        if store is None or store == self.store:
            return self
        if self.store is not None:
            raise InvalidArgument(
                f"name: the URL names the store {self.store}, and name= another one; write one of them"
            )
        return replace(self, store=store)


def shown_url(url: AnyUrl) -> str:
    """A path or URL as it may be printed, even if it can't be parsed."""
    try:
        return DatabaseUrl.parse(url).shown
    except KeyloftError:
        return "a URL that can't be read"  # not quoted: it may have a password anywhere


def _parse_url(scheme: str, before: str, rest: str) -> DatabaseUrl:
    """Parse the rest of a URL, which follows `before`: the scheme, and its slashes if there are any."""
    if scheme == "file":
        path = rest if rest.endswith("?mode=ro") else rest.partition("?")[0]
        raise InvalidArgument(f"file: is not a scheme of Keyloft; write the path alone, or sqlite:///{_quoted(path)}")
    if not before.endswith("//"):
        raise InvalidArgument(
            f"{before}… is neither a path nor a URL: two slashes follow the scheme of a URL, as in sqlite:///app.db or "
            "postgresql://host/app; a path has no scheme"
        )
    if scheme != "sqlite":
        _check_is_utf8(rest)
    match scheme:
        case "sqlite":
            return _parse_sqlite(before, rest)
        case "postgresql" | "postgres":
            return _parse_postgres(rest)
        case "etcd":
            return _parse_etcd(rest)
        case "http" | "https":
            return _parse_http(scheme, rest)
        case "memory" if rest:
            raise InvalidArgument("memory://… has no name; write :memory: for a store in memory")
        case "memory":
            return DatabaseUrl(engine="memory", shown="memory://")
    raise CannotOpen(f"no engine for {scheme}://…; {_USE}")


def _check_is_utf8(rest: str) -> None:
    """Refuse bytes that are no text: two prefixes or passwords that differ in them would be read as the same."""
    try:
        unquote(rest, errors="strict")
    except UnicodeDecodeError:
        raise InvalidArgument(f"what is percent-encoded is not UTF-8, in which é is %C3%A9; {_ESCAPE}") from None


def _parse_sqlite(before: str, rest: str) -> DatabaseUrl:
    path, _, query = rest.partition("?")
    options = query.split("&") if query else []
    is_in_memory = path in ("", "/:memory:")
    if options and is_in_memory:
        raise InvalidArgument(f"mode=ro and immutable=1 need a file, as in {_READ_ONLY}")
    for option in options:
        if option not in _SQLITE_OPTIONS:
            name = option.partition("=")[0]
            if taken := [right for right in _SQLITE_OPTIONS if right.startswith(f"{name}=")]:
                raise InvalidArgument(f"{before}…?…: {name} takes only one value, as in {taken[0]}")
            named = f"there is no option {name}" if name.isidentifier() else "this option is unknown"
            raise InvalidArgument(
                f"{before}…?…: {named}; an SQLite URL takes mode=ro, to open a file read-only, and "
                "mode=ro&immutable=1, for a file that no process writes"
            )
    if options and "mode=ro" not in options:
        raise InvalidArgument(f"{before}…?…: immutable=1 needs mode=ro, as in {_READ_ONLY}&immutable=1")
    if is_in_memory:
        return DatabaseUrl(engine="sqlite", shown=before + rest)
    if path == "/":
        raise InvalidArgument("sqlite:/// names no file; write sqlite:///app.db, or sqlite:// for one in memory")
    if not path.startswith("/"):
        right = f"sqlite:///{_quoted(rest)}"
        raise InvalidArgument(f"{before}…: three slashes precede a relative path, as in {right}, four an absolute one")
    path = path[1:]
    if path.startswith("file:"):
        raise InvalidArgument("the path follows sqlite:/// without file:, as in sqlite:///app.db?mode=ro")
    _check_path(path)
    immutable = "immutable=1" in options
    return DatabaseUrl(
        engine="sqlite", shown=before + rest, path=absolute_path(path), read_only=bool(options), immutable=immutable
    )


def _quoted(path: str) -> str:
    """The path for a message; an example instead, if the path may hold a password."""
    return "app.db" if "@" in path or _LOGIN.match(unquote(path)) else path


def _check_path(path: str) -> None:
    """Refuse the URL of a server with a mistyped scheme: taken for a path, its password would be shown everywhere."""
    if _HOST_AND_PORT.fullmatch(path):
        raise InvalidArgument(f"{path} looks like the address of a server: write http://{path}, or ./{path} for a file")
    if _LOGIN.match(unquote(path)):
        raise InvalidArgument(f"this URL does not begin with a scheme: {_USE}; a file of that name is written ./name")


def _parse_postgres(rest: str) -> DatabaseUrl:
    dsn = f"postgresql://{rest}"
    try:
        parts = _split(dsn)
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError:
        raise InvalidArgument(
            "a PostgreSQL URL is written postgresql://user:password@host/database, and options follow it as "
            "?name=value&name=value"
        ) from None
    login, _, place = parts.netloc.rpartition("@")
    # An option with a bare @ may be the rest of a password that contains a question mark.
    others = [option for option in parts.query.split("&") if not option.startswith(("user=", "password="))]
    if parts.fragment or any("@" in text for text in (login, parts.path, *others)):
        raise InvalidArgument(_ESCAPE)
    user, _, password = login.partition(":")
    if "%3a" in user.lower():
        raise InvalidArgument(f"a plain colon stands between user and password; {_ESCAPE}")
    hosts = _hosts_of_options(options) if "host" in options else [_host(host) for host in place.split(",") if host]
    masked = _SECRET_OPTION.sub(r"\g<1>…", parts.query)
    where = place + parts.path + (f"?{masked}" if masked else "")
    reads, max_lag = _reading_options(options)
    address = PostgresAddress(
        dsn=_OWN_OPTIONS.sub("", dsn).rstrip("?&") if parts.query else dsn,
        reads=reads,
        max_lag=max_lag,
        shown=f"postgresql://{user}@{where}" if user else f"postgresql://{where}",
        name=f"PostgreSQL at {options.get('host') or place or 'the local socket'}{parts.path}",
        hosts=tuple(hosts) if len(hosts) > 1 else ({},),
        options=options,
        secrets=tuple(filter(None, (password, options.get("password")))),
    )
    return DatabaseUrl(engine="postgres", shown=f"postgresql://{where}", postgres=address)


def _reading_options(options: dict[str, str]) -> tuple[str | None, float | None]:
    """The options of a PostgreSQL URL that are Keyloft's own; all others are the driver's or the server's."""
    reads, lag = options.pop("reads", None), options.pop("max_lag", None)
    try:
        max_lag = None if lag is None else float(lag)
    except ValueError:
        max_lag = -1.0
    check_reads(reads, max_lag)
    return reads, max_lag


def check_reads(reads: str | None, max_lag: float | None) -> None:
    """Raise InvalidArgument if an option about which host to read from is wrong."""
    if reads not in (None, "primary", "standby"):
        raise InvalidArgument('reads: expected "primary" or "standby"')
    if max_lag is not None and not (type(max_lag) in (int, float) and 0 < max_lag < math.inf):
        raise InvalidArgument("max_lag: expected a number of seconds above 0")


def _split(url: str) -> SplitResult:
    """The parts of a URL, which may have several hosts: on Python 3.14 `urlsplit` refuses [::1] beside another host.

    Raises:
        ValueError: It is not a URL.
    """
    scheme, _, rest = url.partition("://")
    hosts = re.split("[/?#]", rest, maxsplit=1)[0]
    if hosts.count("[") != hosts.count("]"):
        raise ValueError("an IPv6 address is written between brackets")
    return urlsplit(f"{scheme}://{rest.removeprefix(hosts)}")._replace(netloc=hosts)


def _refuse_empty(scheme: str, options: Mapping[str, str]) -> None:
    """Refuse empty options: ?ca=$CA, with a variable that is not set, must not turn TLS off."""
    if empty := [name for name in options if not options[name]]:
        raise InvalidArgument(f"{scheme}://…?{empty[0]}=: this option is empty: give it a value, or leave it out")


def _parse_etcd(rest: str) -> DatabaseUrl:
    try:
        parts = _split(f"etcd://{rest}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True)) if parts.query else {}
    except ValueError:
        raise InvalidArgument(f"{_ETCD_USE}, and options follow it as ?name=value&name=value") from None
    login, _, place = parts.netloc.rpartition("@")
    if parts.fragment or any("@" in text for text in (login, parts.path, parts.query)):
        raise InvalidArgument(_ESCAPE)
    if wrong := [name for name in options if name not in _ETCD_OPTIONS]:
        named = f"there is no option {wrong[0]}" if wrong[0].isidentifier() else "an option is unknown"
        raise InvalidArgument(f"etcd://…?…: {named}; an etcd URL takes {', '.join(_ETCD_OPTIONS)}")
    _refuse_empty("etcd", options)
    tls = options.pop("tls", "true" if options else "false")
    if tls not in ("true", "false") or (options and tls == "false"):
        raise InvalidArgument("etcd://…?tls=…: expected true or false; ca, cert, key and server_name need TLS")
    if ("cert" in options) != ("key" in options):
        raise InvalidArgument("etcd://…?…: cert and key are given together: a certificate, and its private key")
    hosts = [_host(host) for host in place.split(",") if host] or [{"host": "127.0.0.1"}]
    endpoints = [_endpoint(**host) for host in hosts]
    prefix = unquote(parts.path).strip("/") or _ETCD_PREFIX
    if "\x00" in prefix:
        raise InvalidArgument("etcd://…/…: the prefix contains %00, which Keyloft uses for keys of its own")
    user, _, password = login.partition(":")
    address = EtcdAddress(
        endpoints=tuple(endpoints),
        prefix=prefix,
        name=f"etcd at {','.join(endpoints)}/{prefix}",
        tls=tls == "true",
        user=unquote(user),
        password=unquote(password),
        **options,
    )
    return DatabaseUrl(engine="etcd", shown=f"etcd://{place}{parts.path}", etcd=address)


def _parse_http(scheme: str, rest: str) -> DatabaseUrl:
    try:
        parts = _split(f"{scheme}://{rest}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True)) if parts.query else {}
    except ValueError:
        raise InvalidArgument(_HTTP_USE) from None
    if parts.fragment or "@" in rest:
        raise InvalidArgument(
            f"{_HTTP_USE}; a token is passed as token=…, or set as KEYLOFT_HTTP_TOKEN, not in the URL"
        )
    if wrong := [name for name in options if name != "ca" or scheme == "http"]:
        named = f"there is no option {wrong[0]}" if wrong[0].isidentifier() else "an option is unknown"
        raise InvalidArgument(f"{scheme}://…?…: {named}; an https URL takes ca=FILE alone, and an http URL nothing")
    _refuse_empty(scheme, options)
    path, host = _HTTP_PATH.fullmatch(parts.path), _HTTP_HOST.fullmatch(parts.netloc)
    if path is None or host is None or int(host[1] or 0) > 65_535:
        raise InvalidArgument(_HTTP_USE)
    address = HttpAddress(origin=f"{scheme}://{parts.netloc}{path[1]}", store=path[2], **options)
    return DatabaseUrl(engine="http", shown=address.name, http=address)


def _endpoint(host: str, port: int = _ETCD_PORT) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _hosts_of_options(options: Mapping[str, str]) -> list[dict[str, Any]]:
    """Several hosts that are named after the ?, with as many ports, one, or none."""
    hosts, ports = options["host"].split(","), options.get("port", "").split(",")
    if len(hosts) == 1 or len(ports) not in (1, len(hosts)):
        return []  # asyncpg reads it, or refuses it
    places = zip(hosts, ports if len(ports) == len(hosts) else ports * len(hosts), strict=True)
    return [_host(f"{host}:{port}" if port else host) for host, port in places]


def _host(host: str) -> dict[str, Any]:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return {"host": host.strip("[]")}
    if not port.isdecimal() or not 0 < int(port) < 65536:
        # The host is not quoted: it may be the beginning of a password.
        raise InvalidArgument(f"a host is followed by a colon and its port, from 1 to 65535, or by nothing; {_ESCAPE}")
    if ":" in name and not name.endswith("]"):
        raise InvalidArgument("an IPv6 address is written between brackets, as in [::1]:5432")
    return {"host": name.strip("[]"), "port": int(port)}
