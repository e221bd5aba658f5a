"""Keys of the semantic store, `tenant/<tenant>/project/<project>/<path…>`, and the rows that belong to them."""

import hashlib
import re
from functools import lru_cache
from typing import Final

from msgspec import Struct

from keyloft import limits
from keyloft.core.records import Space, appended_key
from keyloft.errors import InvalidKey, InvalidKeyType, KeyTooLarge
from keyloft.semantic.rules import got

PREFIX: Final = "db.semantic"
"""The subject before `.<tenant>.<project>.<operation>`, unless configured otherwise."""
OPERATIONS: Final = ("put", "get", "delete", "restore", "list", "batch", "audit", "watch", "locks", "dead_letters")
"""The operations that are served over NATS."""

SPACE: Final = Space.SEMANTIC
"""The key space of all rows of the semantic store."""

_KEY: Final = re.compile(r"tenant/([a-z0-9_-]+)/project/([a-z0-9_-]+)/((?:[a-z0-9._-]+/)*[a-z0-9._-]+)", re.ASCII)
_ID: Final = re.compile(r"[a-z0-9_-]+", re.ASCII)
_PART: Final = re.compile(r"[a-z0-9._-]+", re.ASCII)
_BEGINNING: Final = re.compile(r"(?:[a-z0-9._-]+/)*[a-z0-9._-]*", re.ASCII)
_FORM: Final = "tenant/<tenant>/project/<project>/<path>, as in tenant/acme/project/web/docs/onedrive/delta"
_ID_RULE: Final = f"1 to {limits.SEMANTIC_ID_CHARACTERS} lowercase letters, digits, _ and - (a-z 0-9 _ -)"
_PART_RULE: Final = "lowercase letters, digits, dots, _ and - (a-z 0-9 . _ -)"

_DIGEST_HEX: Final = 24
_READABLE: Final = 24

AUDIT_KEY: Final = b"h/audit"
"""The row that holds the secret of the audit's hashes, unless that secret is configured."""

_ENTRY: Final = b"e/"
ROW_KINDS: Final = (b"a/", b"d/", _ENTRY, b"f/", b"i/", b"k/", b"r/", b"x/")
"""How rows of each kind begin, before the tenant and the project: audit records, deleted entries, entries, fencing
tokens, the audit index of keys, pointers to audit records of conflicts, requests, dead letters."""


class Project(Struct, frozen=True):
    """A project of a tenant."""

    tenant: str
    name: str

    @property
    def prefix(self) -> str:
        """How the keys of the project begin."""
        return f"tenant/{self.tenant}/project/{self.name}/"

    def rows(self, kind: bytes) -> bytes:
        """How the project's rows of a kind begin."""
        return b"%b%b/%b/" % (kind, self.tenant.encode(), self.name.encode())

    @property
    def audit_log(self) -> bytes:
        """How the rows of the project's audit records begin."""
        return self.rows(b"a/")

    @property
    def dead_letters(self) -> bytes:
        """How the rows of the project's dead letters begin."""
        return self.rows(b"x/")

    def dead_letter(self, name: str) -> bytes:
        """The row of a dead letter, by its id."""
        return self.dead_letters + name.encode()

    @property
    def fences(self) -> bytes:
        """How the rows of the project's fencing tokens begin."""
        return self.rows(b"f/")

    def fence(self, token: int) -> bytes:
        """The row that names the lock of a fencing token."""
        return appended_key(SPACE, self.fences, token)

    def fence_of(self, row: bytes) -> int:
        """The fencing token that a row of `fence` names."""
        return int.from_bytes(row[len(self.fences) :])

    def batch_request(self, request_id: str) -> bytes:
        """The row that remembers a batch. No path is empty, so no key's request has the same row."""
        return b"%b\x00%b" % (self.rows(b"r/"), request_id.encode())


class EntryKey(Struct, frozen=True):
    """A key, taken apart, and the rows that belong to it."""

    key: str
    project: Project
    path: str
    entry: bytes
    """The row of the entry."""
    audit_log: bytes
    """How the rows of the project's audit records begin; a field, so that a put need not build it each time."""

    @property
    def deleted(self) -> bytes:
        """The row of the entry that was deleted or has expired, until it can no longer be restored."""
        return b"d/" + self.entry[2:]

    def request(self, request_id: str) -> bytes:
        """The row that remembers a request about this key."""
        return b"r/%b\x00%b" % (self.entry[2:], request_id.encode())

    @property
    def audit_index(self) -> bytes:
        """How the index rows begin, which list the audit records of the key's changes."""
        return b"i/%b\x00" % self.entry[2:]

    @property
    def conflicts(self) -> bytes:
        """How the rows begin that point to the audit records of the key's conflicts."""
        return b"k/%b\x00" % self.entry[2:]


def is_entry(row: bytes) -> bool:
    return row.startswith(_ENTRY)


def key_of_row(row: bytes) -> str:
    """The key that a row of an entry belongs to."""
    tenant, project, path = row[len(_ENTRY) :].decode().split("/", 2)
    return f"tenant/{tenant}/project/{project}/{path}"


def path_of(key: str) -> str:
    """The path of a whole key within its project; the key must be valid."""
    return key.split("/", 4)[4]


@lru_cache(limits.PARSED_KEYS)
def _parsed(key: str) -> EntryKey:
    fits = _KEY.fullmatch(key) if len(key) <= limits.SEMANTIC_KEY_CHARACTERS else None
    if fits is None or max(len(fits[1]), len(fits[2])) > limits.SEMANTIC_ID_CHARACTERS:
        raise ValueError
    tenant, project, path = fits.groups()
    within = Project(tenant, project)
    return EntryKey(key, within, path, f"e/{tenant}/{project}/{path}".encode(), within.audit_log)


def _broken_rule(key: str, argument: str) -> InvalidKey:
    words = key.split("/")
    if len(words) < 5 or words[0] != "tenant" or words[2] != "project":
        return InvalidKey(f"{argument}: expected {_FORM}{_got(key)}")
    check_id(words[1], argument, "a tenant of ")
    check_id(words[3], argument, "a project of ")
    for part in words[4:]:
        check_part(part, argument)
    return KeyTooLarge(
        f"{argument}: expected at most {limits.SEMANTIC_KEY_CHARACTERS} characters, got {len(key):,}; "
        "keyloft.semantic.shortened(…) makes a short part of a long identifier"
    )


def parse(key: object, argument: str = "key") -> EntryKey:
    """Take a key apart; `argument` is its name, as the caller wrote it.

    Raises:
        InvalidKey: The key breaks a rule, which the message names.
    """
    if type(key) is not str:
        raise InvalidKeyType(f"{argument}: expected {_FORM}{_got(key)}")
    try:
        return _parsed(key)
    except ValueError:
        raise _broken_rule(key, argument) from None


def key_of(tenant: str, project: str, *parts: str) -> str:
    """The key of these parts, which may have slashes in them.

    Example:
        key_of("acme", "web", "docs/onedrive", "delta")    # 'tenant/acme/project/web/docs/onedrive/delta'

    Raises:
        InvalidKey: The key breaks a rule, which the message names.
    """
    prefix = checked_project(tenant, project).prefix
    if not parts or not all(isinstance(part, str) for part in parts):
        raise InvalidKeyType("parts: expected at least one part of a path, each a str")
    return parse(prefix + "/".join(parts), "parts").key


def checked_project(tenant: object, project: object) -> Project:
    """The project of these ids.

    Raises:
        InvalidKey: An id breaks a rule, which the message names.
    """
    return Project(check_id(tenant, "tenant"), check_id(project, "project"))


def check_id(name: object, argument: str, what: str = "") -> str:
    """The id of a tenant or project, if it keeps to the rules; `what` says which of them, if the argument has both."""
    if not isinstance(name, str) or _ID.fullmatch(name) is None or len(name) > limits.SEMANTIC_ID_CHARACTERS:
        raise InvalidKey(f"{argument}: expected {what}{_ID_RULE}{_got(name)}")
    return name


def check_part(part: object, argument: str) -> str:
    """A part of a path, without slashes."""
    if not isinstance(part, str) or _PART.fullmatch(part) is None:
        raise InvalidKey(f"{argument}: expected each part of the path to have {_PART_RULE}{_got(part)}")
    return part


def tenant_user(tenant: str) -> str:
    """The NATS user of a tenant. Its capitals distinguish it from the users of plugins."""
    return f"TENANT-{tenant}"


class KeyPrefix(Struct, frozen=True):
    """A project, or only the paths in it that begin with a text."""

    project: Project
    path: str

    @property
    def entries(self) -> tuple[bytes, bytes]:
        """The range of the entries' rows."""
        return rows_below(self.project.rows(_ENTRY) + self.path.encode())


def parse_prefix(prefix: object, argument: str = "prefix") -> KeyPrefix:
    """Take a prefix apart: a whole tenant and project, then perhaps the beginning of a path.

    Raises:
        InvalidKey: The prefix breaks a rule, which the message names.
    """
    rule = "a tenant and a project, as in tenant/acme/project/web, and perhaps the beginning of a path"
    if type(prefix) is not str:
        raise InvalidKeyType(f"{argument}: expected {rule}{_got(prefix)}")
    words = prefix.split("/", 4)
    if len(words) < 4 or words[0] != "tenant" or words[2] != "project":
        raise InvalidKey(f"{argument}: expected {rule}{_got(prefix)}")
    project = Project(check_id(words[1], argument, "a tenant of "), check_id(words[3], argument, "a project of "))
    path = words[4] if len(words) > 4 else ""
    if _BEGINNING.fullmatch(path) is None or len(prefix) > limits.SEMANTIC_KEY_CHARACTERS:
        raise InvalidKey(
            f"{argument}: expected the beginning of a path: {_PART_RULE}, single slashes between the parts, "
            f"at most {limits.SEMANTIC_KEY_CHARACTERS} characters in all{_got(path)}"
        )
    return KeyPrefix(project, path)


def rows_below(beginning: bytes) -> tuple[bytes, bytes]:
    """The range of rows that begin with these bytes; the last byte belongs to a text, so it is below 255."""
    return beginning, beginning[:-1] + bytes([beginning[-1] + 1])


def parse_project(project: object) -> Project:
    """The project that `tenant/<tenant>/project/<project>` names.

    Raises:
        InvalidKey: It names no project, or more than a project.
    """
    within = parse_prefix(project, "project")
    if within.path:
        raise InvalidKey(f"project: expected a whole project, {within.project.prefix[:-1]}{_got(project)}")
    return within.project


def rows_of_project(project: str) -> list[tuple[bytes, bytes]]:
    """The ranges of all rows of a project, `tenant/<tenant>/project/<project>`.

    Raises:
        InvalidKey: It names no project, or more than a project.
    """
    within = parse_project(project)
    return [rows_below(within.rows(kind)) for kind in ROW_KINDS]


def shortened(identifier: str) -> str:
    """A part of a path that stands for an identifier of any length and any characters.

    It keeps the beginning readable and adds a hash, so that different identifiers stay different:
    `shortened("https://github.com/Acme/Very-Long…")` is `https-github.com-acme-ve.5f1c…`. The same identifier always
    gives the same part. `SemanticStore.shorten` also records which identifier it was.
    """
    if not isinstance(identifier, str) or not identifier:
        raise InvalidKeyType(
            f"identifier: expected a non-empty str{'' if isinstance(identifier, str) else got(identifier)}"
        )
    try:
        digest = hashlib.blake2b(identifier.encode(), digest_size=_DIGEST_HEX // 2).hexdigest()
    except UnicodeEncodeError:
        raise InvalidKey("identifier: expected Unicode text, got a lone surrogate") from None
    words = re.sub(r"[^a-z0-9._-]+", "-", identifier.lower(), flags=re.ASCII)
    return f"{words[:_READABLE].strip('-.') or 'id'}.{digest}"


def _got(given: object) -> str:
    """What was given: a text is shown, since keys are no secrets."""
    if not isinstance(given, str):
        return got(given)
    shown = ascii(given)
    return f", got {shown if len(shown) <= 60 else shown[:57] + '…'}"
