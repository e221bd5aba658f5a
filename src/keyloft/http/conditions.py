"""Conditional requests (RFC 9110): If-Match and If-None-Match with the versionstamps of entries."""

import re
from typing import Final

from keyloft.http.requests import HttpRequest

ANY: Final = "*"

_MATCH: Final = b"if-match"
_NONE_MATCH: Final = b"if-none-match"
_TAG: Final = re.compile(r'(W/)?"([^"\x00-\x20\x7f]*)"')
_VERSION: Final = re.compile(r"[1-9][0-9]{0,19}", re.ASCII)


def named_versions(request: HttpRequest, name: bytes, *, weak: bool) -> frozenset[int] | str | None:
    """The versionstamps that a conditional header names; `*`, or None without the header.

    A text that is not the ETag of an entry matches nothing. By RFC 9110, `*` stands alone. Where it stands among ETags,
    If-None-Match counts as `*`, and If-Match ignores the `*`: both write less.

    Args:
        request: May have the header several times: it is a list.
        name: Of the header.
        weak: Whether weak ETags count. No entry has one, but proxies make ETags weak.
    """
    texts = [value.decode("latin-1").strip() for each, value in request.headers if each == name]
    if not texts:
        return None
    if texts == [ANY]:
        return ANY
    joined = ", ".join(texts)
    if name == _NONE_MATCH and ANY in [part.strip() for part in _TAG.sub("", joined).split(",")]:
        return ANY
    tags = _TAG.findall(joined)
    return frozenset([int(tag) for is_weak, tag in tags if _VERSION.fullmatch(tag) and (weak or not is_weak)])


def is_conditional(request: HttpRequest) -> bool:
    """Whether a request has one of these headers; most have none."""
    return any([name == _MATCH or name == _NONE_MATCH for name, _ in request.headers])


def is_known(request: HttpRequest, version: int) -> bool:
    """Whether the client has this version of an entry already (If-None-Match of a read)."""
    known = named_versions(request, _NONE_MATCH, weak=True)
    return known is not None and (known == ANY or version in known)


def is_wanted(request: HttpRequest, version: int) -> bool:
    """Whether the client takes this version of an entry (If-Match of a read)."""
    wanted = named_versions(request, _MATCH, weak=False)
    return wanted is None or wanted == ANY or version in wanted


def names_tag(header: str | None, tag: str) -> bool:
    """Whether an If-None-Match header names this ETag, which is not an entry's; weak ETags count, too."""
    if header is None:
        return False
    named = [each.strip().removeprefix("W/") for each in header.split(",")]
    return ANY in named or tag in named


class EntryCondition:
    """What must be stored for a request to be carried out: one of some versions, none of them, any entry, or none."""

    __slots__ = ("_excluded", "_must_exist", "_versions", "is_unconditional", "must_not_exist")

    def __init__(self, request: HttpRequest) -> None:
        """Read the headers of a request."""
        self._versions: frozenset[int] | None = None
        self._excluded: frozenset[int] = frozenset()
        self._must_exist = self.must_not_exist = False
        self.is_unconditional = not is_conditional(request)
        if self.is_unconditional:
            return
        match = named_versions(request, _MATCH, weak=False)
        none_match = named_versions(request, _NONE_MATCH, weak=True)
        self._versions = match if isinstance(match, frozenset) else None
        self._must_exist = match == ANY
        self._excluded = none_match if isinstance(none_match, frozenset) else frozenset()
        self.must_not_exist = none_match == ANY

    def is_met(self, version: int | None) -> bool:
        """Whether the stored version, None for no entry, is one that the request expects."""
        if version is None:
            return self._versions is None and not self._must_exist
        return (
            not self.must_not_exist
            and (self._versions is None or version in self._versions)
            and version not in self._excluded
        )

    @property
    def needs_read(self) -> bool:
        """Whether the stored version must be read before the write: the condition is not one version, or no entry."""
        is_absence = self.must_not_exist and self._versions is None
        is_one = self._versions is not None and len(self._versions) == 1 and not self.must_not_exist
        return self._must_exist or bool(self._excluded) or not (is_absence or is_one)

    @property
    def takes_both(self) -> bool:
        """Whether the request is carried out with an entry as well as without one."""
        return self._versions is None and not self._must_exist and not self.must_not_exist

    @property
    def expected(self) -> int | None:
        """If no read is needed: the one version that must be stored; None for no entry."""
        return next(iter(self._versions)) if self._versions else None
