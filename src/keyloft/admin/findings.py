"""One thing that an examination found: what `check` returns and `keyloft doctor` prints."""

from typing import Literal, TypeAlias

from msgspec import Struct

Severity: TypeAlias = Literal["ok", "warning", "problem", "skipped"]


class Finding(Struct, frozen=True):
    """What was examined, how it is, and what to do about it. It never holds a value or a password."""

    severity: Severity
    code: str
    """What was examined, or what kind of defect it is: `schema`, `damage`, `key`, …"""
    what: str
    """What was found."""
    where: str = ""
    """The row or file that it concerns, if it concerns one."""
    cure: str = ""
    """What to do about it."""
