"""Numbers, sizes and times as the admin page shows them to people."""

from datetime import UTC, datetime
from typing import Final

from markupsafe import Markup

from keyloft.core.schema import LAST_MOMENT

_UNITS: Final = (
    (60, 1, "second"),
    (3600, 60, "minute"),
    (2 * 86_400, 3600, "hour"),
    (60 * 86_400, 86_400, "day"),
    (2 * 365 * 86_400, 30 * 86_400, "month"),
    (float("inf"), 365 * 86_400, "year"),
)
_NONE: Final = "–"


def count(number: float | None) -> str:
    """A number with commas: 12,345."""
    return _NONE if number is None else f"{number:,}"


def size(number: int | None) -> str:
    """Bytes in the unit that fits: 1.5 MB."""
    if number is None:
        return _NONE
    if number < 1000:
        return f"{number} {'byte' if number == 1 else 'bytes'}"
    power = next((power for power in (1, 2, 3) if number < 999.5 * 1000**power), 4)
    return f"{number / 1000**power:.3g} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def rate(number: float | None) -> str:
    """How often in a second: 12.5 /s."""
    if number is None:
        return _NONE
    return f"{number:,.0f} /s" if number >= 100 or number == 0 else f"{number:.3g} /s"


def duration(seconds: float | None) -> str:
    """A short time in the unit that fits: 3.2 ms."""
    if seconds is None:
        return _NONE
    if seconds < 0.001:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def relative(seconds: float) -> str:
    """How far a moment is from now, positive for the future; page.js writes the same."""
    distance = abs(seconds)
    if distance < 1:
        return "now"
    for below, length, unit in _UNITS:
        if distance < below:
            number = int(distance // length)
            words = f"{number} {unit}{'' if number == 1 else 's'}"
            break
    return f"in {words}" if seconds > 0 else f"{words} ago"


def when(moment: datetime | int | None, now: datetime | None = None) -> Markup | str:
    """A moment, also in milliseconds since 1970: relative to now, and the exact one in the title."""
    if moment is None:
        return _NONE
    if isinstance(moment, int):
        moment = datetime.fromtimestamp(min(max(moment, 0), LAST_MOMENT) / 1000, UTC)
    now = now or datetime.now(UTC)
    exact = moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    title = f"{exact[:10]} {exact[11:23]} UTC"
    words = relative((moment - now).total_seconds())
    return Markup('<time datetime="{}" title="{}">{}</time>').format(exact, title, words)
