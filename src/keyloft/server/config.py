"""The settings of a service: from a flag, else from the environment, else from a file.

Each setting is declared once, as a field of `Config`: its name, type, range, default and help text. The flag of
`log_level` is `--log-level`, its environment variable `KEYLOFT_LOG_LEVEL` (that of a URL ends with `_URL`), and
`log_level` is its name in the file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from keyloft import limits
from keyloft.core.addresses import check_host, check_nats_address, check_origin, read_address
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import CannotOpen, InvalidArgument, InvalidPluginName
from keyloft.plugins.quotas import Quota, Quotas
from keyloft.plugins.rules import PREFIXES, QUEUE, plugin_name
from keyloft.semantic.keys import PREFIX as SEMANTIC_PREFIX
from keyloft.semantic.rules import check_purpose
from keyloft.server.environment import read_variable
from keyloft.server.isolation import isolate

if TYPE_CHECKING:
    from keyloft.nats.connection import Login

DEFAULT_NATS_PORT: Final = 4222
OFF: Final = "off"

_YEAR: Final = 365 * 86_400
_QUOTA: Final = re.compile(r"([^:]*):([0-9]{1,15}):([0-9]{1,15})", re.ASCII)
_T = TypeVar("_T")


def _setting(default: _T, description: str, *, metavar: str = "", **bounds: Any) -> _T:
    """A field of `Config`: default, help and bounds; `metavar` is its placeholder, if not the last word of its name."""
    return field(default=default, metadata={"description": description, "metavar": metavar, "bounds": Meta(**bounds)})


def _file(description: str) -> str | None:
    return _setting(None, description, metavar="FILE")


def _seconds(default: float, description: str, *, most: float) -> float:
    return _setting(float(default), description, metavar="SECONDS", gt=0, le=most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The settings of `keyloft serve`."""

    database: str = _setting(
        "sqlite:///keyloft.db",
        "Where the data is: sqlite:///FILE, a path, postgresql://USER:PASSWORD@HOST/DATABASE, "
        "etcd://HOST,HOST,HOST/PREFIX, or :memory:.",
        metavar="URL",
        min_length=1,
    )
    durability: Literal["full", "relaxed"] = _setting(
        "full",
        "full: acknowledged writes survive a power cut. relaxed: they survive a killed process, and are stored sooner.",
    )
    history_seconds: float = _setting(
        limits.HISTORY_SECONDS,
        "Seconds that the change log keeps changes, at least: later commits remove older ones. A watch that was "
        "disconnected for less time continues where it was.",
        metavar="SECONDS",
        ge=0,
        le=10 * _YEAR,
    )
    history_mib: float = _setting(
        limits.HISTORY_MIB,
        "How large the change log may grow, in MiB; beyond that, the oldest changes are removed.",
        metavar="MIB",
        ge=0,
        le=1_048_576,
    )
    nats: tuple[Annotated[str, Meta(min_length=1)], ...] = _setting(
        (),
        "The address of a NATS server, or several of one cluster with commas between. Without it, serve starts a "
        "nats-server on this machine, and the other commands connect there.",
        metavar="URL",
    )
    nats_port: int = _setting(
        DEFAULT_NATS_PORT, "The port of the nats-server that serve starts; 0 takes a free one.", ge=0, le=65_535
    )
    nats_creds: str | None = _file("A NATS credentials file.")
    nats_user: str | None = _setting(None, "The user to log in to NATS as.")
    nats_password: str | None = _setting(
        None, "The password of that user. Better set by the environment: other users of the machine can see flags."
    )
    nats_token: str | None = _setting(None, "A token to log in to NATS with, instead of a user.")
    nats_ca: str | None = _file("The certificate of the authority that signed the NATS server's.")
    nats_cert: str | None = _file("The client certificate, where the NATS server asks for one.")
    nats_key: str | None = _file("The private key of the client certificate.")
    prefixes: tuple[str, ...] = _setting(
        PREFIXES, "The subjects before .<plugin>.<operation>; several with commas.", metavar="SUBJECT", min_length=1
    )
    semantic_prefix: str = _setting(
        SEMANTIC_PREFIX, "The subject before .<tenant>.<project>.<operation> of the semantic store.", metavar="SUBJECT"
    )
    purposes: tuple[str, ...] = _setting(
        (),
        "Purposes besides checkpoint, feature_flag, lock, cursor, config and index_version; several with commas.",
        metavar="NAME",
    )
    audit_key: str | None = _setting(
        None,
        "The secret of the audit trail's hashes; by default, one in the database. Better set by the environment.",
        metavar="SECRET",
    )
    audit_retention: float = _seconds(limits.AUDIT_SECONDS, "Seconds that audit records are kept.", most=10 * _YEAR)
    restore_within: float = _seconds(
        limits.RESTORE_SECONDS, "Seconds that a deleted or expired semantic entry can be restored.", most=10 * _YEAR
    )
    request_memory: float = _seconds(
        limits.REQUEST_MEMORY_SECONDS, "Seconds that a requestId of the semantic store is remembered.", most=_YEAR
    )
    queue: str = _setting(QUEUE, "The queue group: services with the same one share the requests.", pattern=r"^[^\s]+$")
    owner_mib: float = _setting(
        limits.OWNER_BYTES / 2**20,
        "How many MiB the unanswered requests of a plugin or tenant may have before the next is answered BUSY.",
        metavar="MIB",
        gt=0,
        le=1_048_576,
    )
    intake_mib: float = _setting(
        limits.INTAKE_BYTES / 2**20,
        "The same for all plugins together, and for all tenants; a quarter of it is for replies that are being made.",
        metavar="MIB",
        gt=0,
        le=1_048_576,
    )
    requests_per_second: float = _setting(
        0.0,
        "How many requests a plugin or tenant may send a second before the next is answered BUSY; 0: any number.",
        metavar="N",
        ge=0,
        le=1_000_000_000,
    )
    quota_keys: int = _setting(0, "How many keys a plugin may store; 0: any number.", metavar="N", ge=0, le=10**12)
    quota_bytes: int = _setting(
        0, "How many bytes the values of a plugin may have in all; 0: any number.", metavar="N", ge=0, le=10**15
    )
    quotas: tuple[str, ...] = _setting(
        (),
        "Other quotas of some plugins, as in trivia:5000:1000000 for 5,000 keys and a million bytes; several with "
        "commas. A 0 is any number, as in trivia:5000:0.",
        metavar="PLUGIN:KEYS:BYTES",
    )
    deadline: float = _seconds(
        limits.DEADLINE_SECONDS,
        "Seconds after which a request is answered with an error if the database has not answered.",
        most=3600,
    )
    cleanup_every: float = _seconds(limits.CLEANUP_SECONDS, "Seconds between removals of expired entries.", most=_YEAR)
    http: str = _setting(
        "127.0.0.1:9464",
        "Where metrics, health and, with a token, the API are served over HTTP; port 0: a free one; off: nowhere.",
        metavar="HOST:PORT",
    )
    http_token: str | None = _setting(
        None, "A token that may do everything over HTTP, of at least 16 characters. Better set by the environment."
    )
    http_tokens: str | None = _file(
        "A TOML file with the tokens of the API, as `keyloft token new` writes them; it is read again when it changes."
    )
    http_make_token: Literal["yes", "no"] = _setting(
        "no", "yes: where no token is configured, one is made at the start and printed. scripts/serve does so."
    )
    http_hosts: tuple[str, ...] = _setting(
        (),
        "Names besides localhost that HTTP requests may be sent to, as their Host header has them; several with "
        "commas.",
        metavar="NAME",
    )
    http_origins: tuple[str, ...] = _setting(
        (),
        "Web pages that may call the API from browsers, as in https://app.example; several with commas.",
        metavar="ORIGIN",
    )
    http_cert: str | None = _file("The certificate for HTTPS, in PEM, with those between it and its authority.")
    http_key: str | None = _file("The private key of the certificate.")
    http_connections: int = _setting(
        limits.HTTP_CONNECTIONS, "How many HTTP connections there may be at a time.", metavar="N", ge=16, le=1_000_000
    )
    http_page: Literal["full", "read-only", "off"] = _setting(
        "full",
        "The admin page, which needs a token. read-only: it changes nothing, whatever the token may do. off: no admin "
        "page.",
    )
    metrics_prefix: str = _setting("rosey", "What names of metrics begin with.", pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$")
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "debug has a line for every request.")
    log_format: Literal["text", "json"] = _setting("text", "The format of the log, on standard error.")

    def http_address(self) -> tuple[str, int] | None:
        """Where HTTP is served, or None for nowhere."""
        return None if self.http == OFF else read_address(self.http, f"127.0.0.1:9464, or {OFF}")

    def plugin_quotas(self) -> Quotas:
        """How much plugins may store.

        Raises:
            InvalidArgument: One of `quotas` can't be read, or a plugin has two.
        """
        named: dict[str, Quota] = {}
        for text in self.quotas:
            found = _QUOTA.fullmatch(text)
            if found is None:
                raise InvalidArgument(f"expected PLUGIN:KEYS:BYTES, as in trivia:5000:1000000, got {text!a}")
            try:
                plugin = plugin_name(found[1])
            except InvalidPluginName as error:
                raise InvalidArgument(str(error)) from None
            if plugin in named:
                raise InvalidArgument(f"expected one quota for each plugin, got two for {plugin}")
            named[plugin] = _quota(int(found[2]), int(found[3]))
        return Quotas(_quota(self.quota_keys, self.quota_bytes), named)

    def login(self) -> "Login":
        """How to log in to the NATS server."""
        from keyloft.nats.connection import Login  # here, since migrations read settings, too, without nats-py

        names = {"credentials": "nats_creds", "ca": "nats_ca", "certificate": "nats_cert", "key": "nats_key"}
        files = {field: Path(file) for field, name in names.items() if (file := getattr(self, name)) is not None}
        return Login(user=self.nats_user, password=self.nats_password, token=self.nats_token, **files)


def _quota(keys: int, size: int) -> Quota:
    return Quota(keys or None, size or None)


class Setting:
    """One setting: its flag, environment variable, type and default."""

    def __init__(self, declared: Field[Any]) -> None:
        """Derive them from the field of `Config`."""
        self.name = declared.name
        self.default: Any = declared.default
        self.type: Any = Annotated[declared.type, declared.metadata["bounds"]]
        self.description: str = declared.metadata["description"]
        self.metavar: str = declared.metadata["metavar"] or self.name.rpartition("_")[2].upper()
        self.flag = f"--{self.name.replace('_', '-')}"
        self.environment = f"KEYLOFT_{self.name.upper()}{'_URL' if self.metavar == 'URL' else ''}"
        self.is_list = isinstance(self.default, tuple)
        self.choices: tuple[str, ...] = get_args(declared.type) if get_origin(declared.type) is Literal else ()

    @property
    def default_text(self) -> str:
        """The default as a flag has it; empty where there is none."""
        if self.is_list:
            return ",".join(self.default)
        if isinstance(self.default, float):
            return f"{self.default:.15g}"
        return "" if self.default is None else str(self.default)

    def read(self, value: Any, source: str, *, is_text: bool) -> Any:
        """Convert what a source has for this setting; flags and the environment hold text.

        Raises:
            InvalidArgument: The value has the wrong type or is out of range.
        """
        if self.is_list and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if self.choices and isinstance(value, str):
            value = value.lower()
        try:
            return msgspec.convert(value, self.type, strict=not is_text)
        except msgspec.ValidationError as error:
            rule = f"expected one of {', '.join(self.choices)}" if self.choices else _plain(str(error))
            raise InvalidArgument(f"{source}: {rule}") from None


_COMPARED: Final = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def _plain(message: str) -> str:
    """A message of msgspec, in words that a reader of a configuration knows."""
    message = message.split(" - at ")[0].replace("`", "").replace(" | null", "")
    for kind, word in (("int", "whole number"), ("float", "number"), ("str", "text"), ("array", "list")):
        message = re.sub(rf"\b{kind}\b", word, message)
    message = re.sub(r"^Expected (whole number|number|list)\b", r"expected a \1", message).replace(" of length", "")
    for sign, words in _COMPARED.items():
        message = message.replace(f" {sign} ", f" {words} ")
    return message[0].lower() + message[1:]


SETTINGS: Final[Mapping[str, Setting]] = {declared.name: Setting(declared) for declared in fields(Config)}

FlagValues: TypeAlias = Mapping[str, str | None]
"""The flags that were given, by name of the setting; `config` names the file."""

_ARGUMENTS: Final = {"config": "--config"} | {name: setting.flag for name, setting in SETTINGS.items()}


def to_arguments(flags: FlagValues) -> list[str]:
    """The arguments for a process with these flags."""
    given = [(_ARGUMENTS[name], value) for name, value in flags.items() if value is not None]
    return [word for pair in given for word in pair]


def from_arguments(arguments: list[str]) -> FlagValues:
    """The reverse of `to_arguments`."""
    names = {argument: name for name, argument in _ARGUMENTS.items()}
    return {names[flag]: value for flag, value in zip(arguments[::2], arguments[1::2], strict=True)}


NATS_SETTINGS: Final = tuple(name for name in SETTINGS if name.startswith("nats") and name != "nats_port")
"""How to reach a NATS server: clients need these, too."""


HTTP_SETTINGS: Final = tuple(name for name in SETTINGS if name.startswith("http"))
"""How HTTP is served."""
VARIABLES: Final = frozenset({"KEYLOFT_CONFIG", "KEYLOFT_DEBUG", *[one.environment for one in SETTINGS.values()]})
"""All environment variables that Keyloft reads."""


def load(flags: FlagValues, environment: Mapping[str, str] = os.environ, *, only: Iterable[str] = SETTINGS) -> Config:
    """Read the settings from all their sources.

    Args:
        flags: The flags that were given, by name of the setting; `config` names the file.
        environment: The variables; an empty one counts as absent, and so does one that Kubernetes set for a service.
        only: The settings that this command uses.

    Raises:
        InvalidArgument: The file can't be read, or a setting is wrong; the message names its source.
    """
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    file = flags.get("config") or environment.get("KEYLOFT_CONFIG")
    in_file = _from_file(file) if file else {}
    for name in only:
        setting = SETTINGS[name]
        for source, value, is_text in (
            (setting.flag, flags.get(name), True),
            (setting.environment, read_variable(environment, setting.environment), True),
            (f"{file}: {name}", in_file.get(name), False),
        ):
            if value is not None:
                given[name], sources[name] = setting.read(value, source, is_text=is_text), source
                break
    config = Config(**given)
    _check(config, sources)
    # With a scheme, messages can show an address without its password.
    return replace(config, nats=tuple([one if "://" in one else f"nats://{one}" for one in config.nats]))


def check_service(config: Config) -> None:
    """Refuse settings that a service can't be started with.

    Raises:
        InvalidArgument: Two settings contradict each other, or the database's URL can't be one.
    """
    try:
        DatabaseUrl.parse(config.database)
    except (InvalidArgument, CannotOpen) as error:
        setting = SETTINGS["database"]
        raise InvalidArgument(f"{setting.flag} or {setting.environment}: {error}") from None
    logins = [name for name in NATS_SETTINGS if name != "nats" and getattr(config, name) is not None]
    if logins and not config.nats:
        flag = SETTINGS[logins[0]].flag
        raise InvalidArgument(f"{flag} needs --nats: the nats-server that serve starts has no logins")


def _from_file(path: str) -> dict[str, Any]:
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{path}: the configuration can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: the configuration is not TOML: {error}") from None
    for name in settings:
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1)
            hint = f"; did you mean {near[0]}?" if near else ": `keyloft serve --help` lists all"
            if isinstance(settings[name], dict):
                raise InvalidArgument(f"{path}: [{name}]: settings are in no section; remove this line")
            raise InvalidArgument(f"{path}: there is no setting {name}{hint}")
    return settings


def _check(config: Config, sources: Mapping[str, str]) -> None:
    """Check rules that the types of the settings can't express."""
    for name, needed in (("nats_key", "nats_cert"), ("nats_password", "nats_user"), ("http_key", "http_cert")):
        if name in sources and getattr(config, needed) is None:
            raise InvalidArgument(f"{sources[name]} needs {SETTINGS[needed].flag}, too")
    for name, source in sources.items():
        try:
            _check_one(name, config)
        except InvalidArgument as error:
            raise InvalidArgument(f"{source}: {error}") from None


def _check_one(name: str, config: Config) -> None:
    value = getattr(config, name)
    match name:
        case "http":
            config.http_address()
        case "http_token" if len(value) < limits.HTTP_TOKEN_CHARACTERS or not value.isascii() or " " in value:
            raise InvalidArgument(
                f"expected at least {limits.HTTP_TOKEN_CHARACTERS} characters of ASCII, without spaces"
            )
        case "http_hosts":
            for host in value:
                check_host(host)
        case "http_origins":
            for origin in value:
                check_origin(origin)
        case "prefixes" | "semantic_prefix":
            isolate((), prefixes=config.prefixes, semantic_prefix=config.semantic_prefix)
        case "quotas":
            config.plugin_quotas()
        case "purposes":
            for purpose in value:
                check_purpose(purpose)
        case "nats":
            for address in value:
                check_nats_address(address)
        case _ if SETTINGS[name].metavar == "FILE" and not os.access(value, os.R_OK):
            raise InvalidArgument(f"the file {value} does not exist, or can't be read")
