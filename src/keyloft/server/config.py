"""What can be set when Keyloft runs as a service: by a flag, by the environment, by a file, in that order.

Each setting is declared once, as a field of `Config`: its name, type, range, default and help text. The flag of
`log_level` is `--log-level`, its environment variable `KEYLOFT_LOG_LEVEL`, and `log_level` is its name in the file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from keyloft import limits
from keyloft.errors import InvalidArgument
from keyloft.plugins.rules import PREFIXES, QUEUE
from keyloft.semantic.keys import PREFIX as SEMANTIC_PREFIX
from keyloft.semantic.rules import check_purpose
from keyloft.server.isolation import isolate

if TYPE_CHECKING:
    from keyloft.nats.connection import Login

DEFAULT_NATS_PORT: Final = 4222
OFF: Final = "off"

_DAY: Final = 86_400
_ADDRESS: Final = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})", re.ASCII)
_FILES: Final = ("nats_creds", "nats_ca", "nats_cert", "nats_key")


class Config(Struct, frozen=True, kw_only=True):
    """The settings of `keyloft serve`."""

    database: Annotated[
        str,
        Meta(
            min_length=1,
            description="Where the data is: sqlite:///FILE, a path, postgresql://USER:PASSWORD@HOST/DATABASE, "
            "or :memory:.",
            extra={"env": "KEYLOFT_DATABASE_URL", "metavar": "URL"},
        ),
    ] = "sqlite:///keyloft.db"
    durability: Annotated[
        Literal["full", "relaxed"],
        Meta(
            description="full: what was acknowledged survives a power cut. relaxed: it survives the end of the "
            "process, and is stored sooner."
        ),
    ] = "full"
    nats: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="The address of a NATS server, or several of one cluster with commas in between. "
            "Without it, serve runs a nats-server of its own on this machine, and the other commands ask there.",
            extra={"env": "KEYLOFT_NATS_URL", "metavar": "URL"},
        ),
    ] = ()
    nats_port: Annotated[
        int,
        Meta(ge=0, le=65_535, description="The port of our own nats-server; 0 takes a free one."),
    ] = DEFAULT_NATS_PORT
    nats_creds: Annotated[str | None, Meta(description="A NATS credentials file.", extra={"metavar": "FILE"})] = None
    nats_user: Annotated[str | None, Meta(description="The user to log in to NATS as.")] = None
    nats_password: Annotated[
        str | None,
        Meta(description="Its password. Better set by the environment: other users of a machine see flags."),
    ] = None
    nats_token: Annotated[str | None, Meta(description="A token to log in to NATS with, instead of a user.")] = None
    nats_ca: Annotated[
        str | None,
        Meta(description="The certificate of the authority that signed the NATS server's.", extra={"metavar": "FILE"}),
    ] = None
    nats_cert: Annotated[
        str | None,
        Meta(description="Our own certificate, where the NATS server wants one.", extra={"metavar": "FILE"}),
    ] = None
    nats_key: Annotated[
        str | None, Meta(description="The private key of our own certificate.", extra={"metavar": "FILE"})
    ] = None
    prefixes: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            description="What comes before .<plugin>.<operation> in the subjects served; several with commas.",
            extra={"metavar": "SUBJECT"},
        ),
    ] = PREFIXES
    semantic_prefix: Annotated[
        str,
        Meta(
            description="What comes before .<tenant>.<project>.<operation> in the subjects of the semantic store.",
            extra={"metavar": "SUBJECT"},
        ),
    ] = SEMANTIC_PREFIX
    purposes: Annotated[
        tuple[str, ...],
        Meta(
            description="What entries of the semantic store may be for, besides checkpoint, feature_flag, lock, "
            "cursor, config and index_version; several with commas.",
            extra={"metavar": "NAME"},
        ),
    ] = ()
    audit_key: Annotated[
        str | None,
        Meta(
            description="The secret that the audit trail's hashes are made with. Without it, one is kept in the "
            "database. Better set by the environment.",
            extra={"metavar": "SECRET"},
        ),
    ] = None
    audit_retention: Annotated[
        float,
        Meta(
            gt=0, le=3650 * _DAY, description="Seconds for which audit records are kept.", extra={"metavar": "SECONDS"}
        ),
    ] = float(limits.AUDIT_SECONDS)
    restore_within: Annotated[
        float,
        Meta(
            gt=0,
            le=3650 * _DAY,
            description="Seconds for which what was deleted or expired in the semantic store can be restored.",
            extra={"metavar": "SECONDS"},
        ),
    ] = float(limits.RESTORE_SECONDS)
    request_memory: Annotated[
        float,
        Meta(
            gt=0,
            le=365 * _DAY,
            description="Seconds for which a requestId of the semantic store is remembered.",
            extra={"metavar": "SECONDS"},
        ),
    ] = float(limits.REQUEST_MEMORY_SECONDS)
    queue: Annotated[
        str,
        Meta(pattern=r"^[^\s]+$", description="The queue group: services with the same one share the requests."),
    ] = QUEUE
    requests_per_plugin: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="How many requests of one plugin or tenant are taken before one is answered BUSY.",
            extra={"metavar": "N"},
        ),
    ] = limits.REQUESTS_PER_PLUGIN
    requests_in_all: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="How many requests of all plugins, or tenants, are taken before one is answered BUSY.",
            extra={"metavar": "N"},
        ),
    ] = limits.REQUESTS
    deadline: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Seconds after which a request is answered with an error if the database has not answered.",
            extra={"metavar": "SECONDS"},
        ),
    ] = limits.DEADLINE_SECONDS
    cleanup_every: Annotated[
        float,
        Meta(
            gt=0,
            le=365 * _DAY,
            description="Seconds between two removals of what has expired.",
            extra={"metavar": "SECONDS"},
        ),
    ] = limits.CLEANUP_SECONDS
    http: Annotated[
        str,
        Meta(
            description="Where metrics and health are shown; port 0 takes a free one, and off shows nothing.",
            extra={"metavar": "HOST:PORT"},
        ),
    ] = "127.0.0.1:9464"
    metrics_prefix: Annotated[
        str,
        Meta(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$", description="What the names of the metrics begin with."),
    ] = "rosey"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="debug tells of every request.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="How the log is written to the standard error output.")
    ] = "text"

    def http_address(self) -> tuple[str, int] | None:
        """Where metrics and health are shown, or None for nowhere."""
        if self.http == OFF:
            return None
        found = _ADDRESS.fullmatch(self.http)
        if found is None or int(found[3]) > 65_535:
            raise InvalidArgument(f"http must be host:port, as in 127.0.0.1:9464, or {OFF}")
        return found[1] or found[2], int(found[3])

    def login(self) -> "Login":
        """How to get into the NATS server."""

        def path(name: str | None) -> Path | None:
            return None if name is None else Path(name)

        from keyloft.nats.connection import Login  # migrations read settings, too, and need no NATS

        return Login(
            credentials=path(self.nats_creds),
            user=self.nats_user,
            password=self.nats_password,
            token=self.nats_token,
            ca=path(self.nats_ca),
            certificate=path(self.nats_cert),
            key=path(self.nats_key),
        )


class Setting(Struct, frozen=True):
    """One setting, as its sources know it."""

    name: str
    type: Any
    default: Any
    description: str
    environment: str
    metavar: str

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        [kind, *_] = get_args(self.type)
        return tuple(get_args(kind)) if getattr(kind, "__origin__", None) is Literal else ()

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)

    def read(self, value: Any, source: str, *, is_text: bool) -> Any:
        """The value of a setting, as a source gives it; flags and the environment have nothing but text.

        Raises:
            InvalidArgument: It is of the wrong type or out of range.
        """
        if self.is_list and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if self.choices and isinstance(value, str):
            value = value.lower()
        try:
            return msgspec.convert(value, self.type, strict=not is_text)
        except msgspec.ValidationError as error:
            told = f"it must be one of {', '.join(self.choices)}" if self.choices else _plainly(str(error))
            raise InvalidArgument(f"{source}: {told}") from None


def _plainly(told: str) -> str:
    told = told.split(" - at ")[0].replace("`", "").replace(" | null", "")
    for theirs, ours in (("int", "whole number"), ("float", "number"), ("str", "text"), ("array", "list")):
        told = re.sub(rf"\b{theirs}\b", ours, told)
    return told[0].lower() + told[1:]


def _declared() -> dict[str, Setting]:
    found = {}
    for declared in msgspec.structs.fields(Config):
        meta = next(part for part in get_args(declared.type) if isinstance(part, Meta))
        extra = meta.extra or {}
        found[declared.name] = Setting(
            declared.name,
            declared.type,
            declared.default,
            meta.description or "",
            extra.get("env", f"KEYLOFT_{declared.name.upper()}"),
            extra.get("metavar", declared.name.rpartition("_")[2].upper()),
        )
    return found


SETTINGS: Final[Mapping[str, Setting]] = _declared()

Flags: TypeAlias = Mapping[str, str | None]
"""By name of the setting, what was given by flags; `config` names the file."""

_ARGUMENTS: Final = {"config": "--config"} | {name: setting.flag for name, setting in SETTINGS.items()}


def to_arguments(flags: Flags) -> list[str]:
    """The arguments of a process that is to have these flags."""
    given = [(_ARGUMENTS[name], value) for name, value in flags.items() if value is not None]
    return [word for pair in given for word in pair]


def from_arguments(arguments: list[str]) -> Flags:
    """What `to_arguments` was given."""
    names = {argument: name for name, argument in _ARGUMENTS.items()}
    return {names[flag]: value for flag, value in zip(arguments[::2], arguments[1::2], strict=True)}


NATS_SETTINGS: Final = tuple(name for name in SETTINGS if name.startswith("nats") and name != "nats_port")
"""How to reach a NATS server: what clients need, too."""


def load(
    flags: Flags,
    environment: Mapping[str, str] = os.environ,
    *,
    only: Iterable[str] = SETTINGS,
) -> Config:
    """Put the settings together.

    Args:
        flags: By name of the setting, those that were given; `config` names the file.
        environment: The variables; an empty one counts as absent.
        only: The settings that matter to this command.

    Raises:
        InvalidArgument: The file can't be read, or a setting is wrong; the message names its source.
    """
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    file = flags.get("config") or environment.get("KEYLOFT_CONFIG")
    in_file = _from_file(file) if file else {}
    for name in only:
        setting = SETTINGS[name]
        if (text := flags.get(name)) is not None:
            source, value, is_text = setting.flag, text, True
        elif variable := environment.get(setting.environment):
            source, value, is_text = setting.environment, variable, True
        elif name in in_file:
            source, value, is_text = f"{file}: {name}", in_file[name], False
        else:
            continue
        given[name] = setting.read(value, source, is_text=is_text)
        sources[name] = source
    config = Config(**given)
    _check(config, sources)
    # With its scheme, an address is shown without the password that it may hold.
    return replace(config, nats=tuple([one if "://" in one else f"nats://{one}" for one in config.nats]))


def check_service(config: Config) -> None:
    """Whatever a service can't be started with.

    Raises:
        InvalidArgument: Two settings contradict each other.
    """
    logins = [name for name in NATS_SETTINGS if name != "nats" and getattr(config, name) is not None]
    if logins and not config.nats:
        raise InvalidArgument(
            f"{SETTINGS[logins[0]].flag} needs {SETTINGS['nats'].flag}: our own nats-server asks for no login"
        )


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
            hint = f"; is {near[0]} meant?" if near else ": `keyloft serve --help` lists all"
            raise InvalidArgument(f"{path}: there is no setting {name}{hint}")
    return settings


def _check(config: Config, sources: Mapping[str, str]) -> None:
    """What a type can't say."""
    for name in _FILES:
        path = getattr(config, name)
        if path is not None and not os.access(path, os.R_OK):
            raise InvalidArgument(f"{sources[name]}: the file {path} is not there, or can't be read")
    for name, needed in (("nats_key", "nats_cert"), ("nats_password", "nats_user")):
        if getattr(config, name) is not None and getattr(config, needed) is None:
            raise InvalidArgument(f"{sources[name]}: it needs {SETTINGS[needed].flag}, too")
    for address in config.nats:
        if re.fullmatch(r"(?:(?:nats|tls|ws|wss)://)?[^\s/?#]+/?", address) is None:
            raise InvalidArgument(f"{sources['nats']}: an address is like nats://127.0.0.1:{DEFAULT_NATS_PORT}")

    def subjects() -> None:
        isolate((), prefixes=config.prefixes, semantic_prefix=config.semantic_prefix)

    def purposes() -> None:
        for purpose in config.purposes:
            check_purpose(purpose)

    for name, check in (
        ("http", config.http_address),
        ("prefixes", subjects),
        ("semantic_prefix", subjects),
        ("purposes", purposes),
    ):
        if name in sources:
            try:
                check()
            except InvalidArgument as error:
                raise InvalidArgument(f"{sources[name]}: {error}") from None
