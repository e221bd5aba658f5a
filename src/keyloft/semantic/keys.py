"""Keys of the semantic store: `tenant/<tenant>/project/<project>/<path…>`, and where each kind of row is kept."""

import hashlib
import re
from functools import lru_cache
from typing import Final

from msgspec import Struct

from keyloft import limits
from keyloft.core.records import appended_key
from keyloft.errors import InvalidKey, InvalidKeyType, KeyTooLarge

PREFIX: Final = "db.semantic"
"""The subject before `.<tenant>.<project>.<operation>`, unless configured otherwise."""
OPERATIONS: Final = ("put", "get", "delete", "list", "batch")
"""What can be asked for over NATS."""

_KEY: Final = re.compile(r"tenant/([a-z0-9_-]+)/project/([a-z0-9_-]+)/((?:[a-z0-9._-]+/)*[a-z0-9._-]+)", re.ASCII)
_ID: Final = re.compile(r"[a-z0-9_-]+", re.ASCII)
_PART: Final = re.compile(r"[a-z0-9._-]+", re.ASCII)
_BEGINNING: Final = re.compile(r"(?:[a-z0-9._-]+/)*[a-z0-9._-]*", re.ASCII)
_FORM: Final = "a key is tenant/<tenant>/project/<project>/<path>"
_ID_RULE: Final = "lowercase letters, digits, _ and - (a-z 0-9 _ -)"
_PART_RULE: Final = "lowercase letters, digits, dots, _ and - (a-z 0-9 . _ -)"

_DIGEST_HEX: Final = 24
_READABLE: Final = 24


class Place(Struct, frozen=True):
    """A key, taken apart."""

    key: str
    tenant: str
    project: str
    path: str
    entry: bytes
    """Where the entry is stored."""

    @property
    def inside(self) -> bytes:
        """The tenant and project, as rows of all kinds name them."""
        return project_bytes(self.tenant, self.project)

    @property
    def deleted(self) -> bytes:
        """Where what was deleted or has expired waits to be restored."""
        return b"d/" + self.entry[2:]

    def request(self, request_id: str) -> bytes:
        """Where a request about this key is remembered."""
        return b"r/%b\x00%b" % (self.entry[2:], request_id.encode())

    @property
    def log(self) -> bytes:
        """Where the audit records of its project begin."""
        return audit_log(self.tenant, self.project)

    @property
    def trace(self) -> bytes:
        """Where the pointers to its own audit records begin."""
        return b"k/%b\x00" % self.entry[2:]

    def fence(self, token: int) -> bytes:
        """Where a fencing token of its project points to its lock."""
        return appended_key(self.fences, token)

    @property
    def fences(self) -> bytes:
        return b"f/%b/" % self.inside


def project_bytes(tenant: str, project: str) -> bytes:
    return f"{tenant}/{project}".encode()


def audit_log(tenant: str, project: str) -> bytes:
    """Where the audit records of a project begin."""
    return b"a/%b/" % project_bytes(tenant, project)


def dead_letters(tenant: str, project: str) -> bytes:
    """Where the dead letters of a project begin."""
    return b"x/%b/" % project_bytes(tenant, project)


def batch_request(tenant: str, project: str, request_id: str) -> bytes:
    """Where a request about several keys is remembered; no path is empty, so it is nobody else's."""
    return b"r/%b/\x00%b" % (project_bytes(tenant, project), request_id.encode())


AUDIT_KEY: Final = b"h/audit"
"""Where the key of the audit's hashes is kept, unless it is configured."""

_ENTRY: Final = b"e/"
KINDS: Final = (b"a/", b"d/", _ENTRY, b"f/", b"k/", b"r/", b"x/")
"""How the rows of each kind begin, before the tenant and the project: audit records, what was deleted, entries, fences,
pointers to audit records, requests, dead letters."""


def is_entry(row: bytes) -> bool:
    return row.startswith(_ENTRY)


def key_of_row(row: bytes) -> str:
    """The key of the entry that a row holds."""
    tenant, project, path = row[len(_ENTRY) :].decode().split("/", 2)
    return f"tenant/{tenant}/project/{project}/{path}"


@lru_cache(maxsize=16_384)  # about 7 MB at the most; to take a key apart costs a fifth of a get
def _parsed(key: str) -> Place:
    fits = _KEY.fullmatch(key) if len(key) <= limits.SEMANTIC_KEY_CHARACTERS else None
    if fits is None or max(len(fits[1]), len(fits[2])) > limits.SEMANTIC_ID_CHARACTERS:
        raise _what_is_wrong(key)
    tenant, project, path = fits.groups()
    return Place(key, tenant, project, path, f"e/{tenant}/{project}/{path}".encode())


def _what_is_wrong(key: str) -> InvalidKey:
    """The rule that a key breaks."""
    words = key.split("/")
    if len(words) < 5 or words[0] != "tenant" or words[2] != "project":
        return InvalidKey(f"key: {_FORM}, as in tenant/acme/project/web/docs/onedrive/delta; this one is {_shown(key)}")
    tenant_id(words[1], "key: the tenant")
    project_id(words[3], "key: the project")
    for part in words[4:]:
        if _PART.fullmatch(part) is None:
            what = "an empty part" if not part else f"the part {_shown(part)}"
            return InvalidKey(f"key: {what} is not allowed; each part of the path has {_PART_RULE}")
    return KeyTooLarge(
        f"key: {len(key)} characters are over the limit of {limits.SEMANTIC_KEY_CHARACTERS}; "
        "keyloft.semantic.shortened(…) makes a short part of a long identifier"
    )


def place(key: object) -> Place:
    """Take a key apart.

    Raises:
        InvalidKey: It breaks a rule, which the message names.
    """
    if type(key) is not str:
        raise InvalidKeyType(f"key: {_FORM}, a str, not {type(key).__name__}")
    return _parsed(key)


def key_of(tenant: str, project: str, *parts: str) -> str:
    """The key of these parts, which may have slashes in them.

    Example:
        key_of("acme", "web", "docs/onedrive", "delta")    # 'tenant/acme/project/web/docs/onedrive/delta'

    Raises:
        InvalidKey: The key breaks a rule, which the message names.
    """
    if not parts or not all(isinstance(part, str) for part in (tenant, project, *parts)):
        raise InvalidKeyType(f"key: {_FORM}: a tenant, a project and at least one part of a path, each a str")
    tenant_id(tenant)
    project_id(project)
    return place(f"tenant/{tenant}/project/{project}/{'/'.join(parts)}").key


def tenant_id(tenant: object, field: str = "tenant") -> str:
    """A tenant's id, if it can be one."""
    return _id(tenant, field)


def tenant_user(tenant: str) -> str:
    """Whom a tenant logs in to NATS as; no plugin can have a name in capitals."""
    return f"TENANT-{tenant}"


def project_id(project: object, field: str = "project") -> str:
    """A project's id, if it can be one."""
    return _id(project, field)


def _id(name: object, field: str) -> str:
    if not isinstance(name, str) or _ID.fullmatch(name) is None:
        shown = _shown(name) if isinstance(name, str) else type(name).__name__
        raise InvalidKey(f"{field} must be {_ID_RULE}, and not empty; this is {shown}")
    if len(name) > limits.SEMANTIC_ID_CHARACTERS:
        raise InvalidKey(f"{field} must be ≤{limits.SEMANTIC_ID_CHARACTERS} characters, not {len(name)}")
    return name


class Below(Struct, frozen=True):
    """What a list or a watch is about: a project, or those of its paths that begin with a text."""

    tenant: str
    project: str
    path: str

    @property
    def rows(self) -> tuple[bytes, bytes]:
        """The range of its entries."""
        return rows_below(f"e/{self.tenant}/{self.project}/{self.path}".encode())


def below(prefix: object) -> Below:
    """Take a prefix apart: a whole tenant and project, then any text that a path can begin with.

    Raises:
        InvalidKey: It breaks a rule, which the message names.
    """
    if type(prefix) is not str:
        raise InvalidKeyType(f"prefix: it is a str, as in tenant/acme/project/web/docs/, not {type(prefix).__name__}")
    words = prefix.split("/", 4)
    if len(words) < 4 or words[0] != "tenant" or words[2] != "project":
        raise InvalidKey(
            "prefix: it begins with a tenant and a project, as in tenant/acme/project/web/docs/; "
            f"this is {_shown(prefix)}"
        )
    tenant, project = tenant_id(words[1], "prefix: the tenant"), project_id(words[3], "prefix: the project")
    path = words[4] if len(words) > 4 else ""
    if _BEGINNING.fullmatch(path) is None or len(prefix) > limits.SEMANTIC_KEY_CHARACTERS:
        raise InvalidKey(
            f"prefix: no path begins like this; paths have {_PART_RULE}, slashes between their parts, "
            f"and at most {limits.SEMANTIC_KEY_CHARACTERS} characters in all"
        )
    return Below(tenant, project, path)


def rows_below(beginning: bytes) -> tuple[bytes, bytes]:
    """The range of rows that begin like this; what it begins with is text, so there is a byte after its last one."""
    return beginning, beginning[:-1] + bytes([beginning[-1] + 1])


def rows_of_project(project: str) -> list[tuple[bytes, bytes]]:
    """The ranges of all rows of a project, `tenant/<tenant>/project/<project>`: its entries, their trail, and the rest.

    Raises:
        InvalidKey: It names none.
    """
    inside = below(project)
    if inside.path:
        raise InvalidKey(f"{_shown(project)} is below a project: name tenant/{inside.tenant}/project/{inside.project}")
    return [rows_below(b"%b%b/" % (kind, project_bytes(inside.tenant, inside.project))) for kind in KINDS]


def shortened(identifier: str) -> str:
    """A part of a path that stands for an identifier of any length and any characters.

    It keeps the beginning readable and adds a hash, so that different identifiers stay different:
    `shortened("https://github.com/Acme/Very-Long…")` is `https-github.com-acme-ve.5f1c…`. The same identifier gives the
    same part, everywhere and for ever. `SemanticStore.shorten` also records which identifier it was.
    """
    if not isinstance(identifier, str) or not identifier:
        raise InvalidKeyType("identifier: a str that is not empty")
    try:
        digest = hashlib.blake2b(identifier.encode(), digest_size=_DIGEST_HEX // 2).hexdigest()
    except UnicodeEncodeError:
        raise InvalidKey("identifier: it holds a lone surrogate, which is no Unicode text") from None
    words = re.sub(r"[^a-z0-9._-]+", "-", identifier.lower(), flags=re.ASCII)
    return f"{words[:_READABLE].strip('-.') or 'id'}.{digest}"


def _shown(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}…'"
