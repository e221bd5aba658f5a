"""Conditional requests: If-Match and If-None-Match with the versionstamps of entries."""

import re
from typing import Final

from keyloft.errors import InvalidArgument
from keyloft.http.requests import HttpRequest
from keyloft.http.wire import read_versionstamp

ANY: Final = "*"

_TAG: Final = re.compile(r'(?:W/)?"([0-9]{1,20})"', re.ASCII)


def wanted_versions(request: HttpRequest, name: bytes) -> frozenset[int] | str | None:
    """The versionstamps that a conditional header names; `*`, or None without the header.

    Raises:
        InvalidArgument: It is not a list of ETags as entries have them.
    """
    text = request.header(name)
    if text is None:
        return None
    text = text.strip()
    if text == ANY:
        return ANY
    found = frozenset([read_versionstamp(tag, name.decode()) for tag in _TAG.findall(text)])
    if not found or _TAG.sub("", text).strip(", \t"):
        raise InvalidArgument(f'{name.decode()}: expected the ETag of an entry with its quotes, as in "7", or *')
    return found


def is_known(request: HttpRequest, version: int) -> bool:
    """Whether the client has this version of an entry already (If-None-Match of a read)."""
    known = wanted_versions(request, b"if-none-match")
    return known is not None and (known == ANY or version in known)


def names_tag(header: str | None, tag: str) -> bool:
    """Whether an If-None-Match header names this ETag, of something else than an entry; weak ones count, too."""
    if header is None:
        return False
    named = [each.strip().removeprefix("W/") for each in header.split(",")]
    return ANY in named or tag in named


class WriteCondition:
    """What must be stored for a write to be made: one of some versions, anything, or nothing."""

    __slots__ = ("must_exist", "must_not_exist", "versions")

    def __init__(self, request: HttpRequest) -> None:
        """Read the headers of a request.

        Raises:
            InvalidArgument: They are not ones that writes have.
        """
        self.versions: frozenset[int] | None = None
        self.must_exist = self.must_not_exist = False
        if not any([name == b"if-match" or name == b"if-none-match" for name, _ in request.headers]):
            return  # most writes
        match, none_match = wanted_versions(request, b"if-match"), wanted_versions(request, b"if-none-match")
        if none_match is not None and none_match != ANY:
            raise InvalidArgument("if-none-match: a write takes * alone, which stands for a key without an entry")
        if match is not None and none_match is not None:
            raise InvalidArgument("if-match, if-none-match: expected one of them, got both")
        self.versions = match if isinstance(match, frozenset) else None
        self.must_exist = match == ANY
        self.must_not_exist = none_match == ANY

    def is_met(self, version: int | None) -> bool:
        """Whether the stored version, None for no entry, is one that the write may replace."""
        if self.versions is not None:
            return version in self.versions
        if self.must_not_exist:
            return version is None
        return not self.must_exist or version is not None

    @property
    def needs_read(self) -> bool:
        """Whether the stored version has to be known before the write: `If-Match: *`, or several versions."""
        return self.must_exist or (self.versions is not None and len(self.versions) > 1)

    @property
    def is_unconditional(self) -> bool:
        return self.versions is None and not self.must_exist and not self.must_not_exist

    @property
    def expected(self) -> int | None:
        """The one version that must be stored; None for no entry."""
        return next(iter(self.versions)) if self.versions else None
