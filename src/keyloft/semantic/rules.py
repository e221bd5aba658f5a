"""The rules for arguments of the semantic store. Errors name the argument as a Python caller writes it."""

import re
from typing import Final, TypeAlias

from keyloft import limits
from keyloft.core import values
from keyloft.errors import InvalidArgument, ValueTooLarge

PURPOSES: Final = ("checkpoint", "feature_flag", "lock", "cursor", "config", "index_version")
"""The purposes that every store knows; `SemanticStore(kv, purposes=[…])` adds to them."""

LOCK: Final = "lock"

ExpectedVersion: TypeAlias = int | str
"""0: the key must have no entry; n: its entry must be version n; "*": either."""

ANY: Final = "*"

_PURPOSE: Final = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_DEAD_LETTER_ID: Final = re.compile(r"[0-9a-f]{24}", re.ASCII)
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def wrong(argument: str, rule: str, given: object, *kinds: type, cure: str = "") -> InvalidArgument:
    """The error for an argument that breaks a rule. It shows the type of what was given, never the value.

    Args:
        argument: Its name, as the caller wrote it.
        rule: What was expected.
        given: What the caller gave.
        kinds: Types that the rule allows: if `given` has one, the message leaves its type out.
        cure: What to do about it.
    """
    return InvalidArgument(f"{argument}: expected {rule}{'' if type(given) in kinds else got(given)}{cure}")


def got(given: object) -> str:
    return f", got {'None' if given is None else type(given).__name__}"


def too_large(size: int | None) -> ValueTooLarge:
    """The error for a value of this many bytes."""
    most = limits.SEMANTIC_VALUE_BYTES
    text = (
        f"value: expected at most {most // 1024} KiB ({most:,} bytes) of compact JSON, got {size:,} bytes; store less"
    )
    return ValueTooLarge(size, most, text)


def value_json(value: object) -> bytes:
    """The stored form of a value.

    Raises:
        InvalidValue: It would not come back equal.
        ValueTooLarge: It takes more than 64 KiB.
    """
    try:
        data = values.encode_json(value, limits.SEMANTIC_VALUE_BYTES, limits.PLUGIN_VALUE_DEPTH)
    except ValueTooLarge as error:
        raise too_large(error.size) from None
    return check_size(data)


def check_size(stored: bytes) -> bytes:
    """The stored form of a value, unless it takes more than 64 KiB."""
    if len(stored) > limits.SEMANTIC_VALUE_BYTES:
        raise too_large(len(stored))
    return stored


def check_text(content: object, argument: str, longest: int = limits.WRITER_CHARACTERS) -> str:
    """A text that fits into a line of a log."""
    if type(content) is not str or not content:
        raise wrong(argument, "a non-empty str", content, str)
    if len(content) > longest:
        raise InvalidArgument(f"{argument}: expected at most {longest} characters, got {len(content):,}")
    if found := _UNPRINTABLE.search(content):
        raise InvalidArgument(
            f"{argument}: expected no control characters and no lone surrogates, got U+{ord(found[0]):04X}"
        )
    return content


def directive_of(writer: str) -> str:
    """The directive that a writer carries out; for a service account, its name."""
    return writer.partition(":")[2] or writer


def check_expected_version(version: object) -> int | None:
    """The version that an entry must have; 0 for no entry, None for any version or none."""
    if version == ANY and type(version) is str:
        return None
    if type(version) is not int or not 0 <= version < 2**63:
        rule = 'the version of the stored entry, 0 if there must be none, or "*" for either'
        raise wrong("expected_version", rule, version, int)
    return version


def check_purpose(purpose: object, argument: str = "purpose") -> str:
    if type(purpose) is not str or _PURPOSE.fullmatch(purpose) is None or len(purpose) > limits.PURPOSE_CHARACTERS:
        rule = f"a name such as cursor: a-z 0-9 _, a letter first, at most {limits.PURPOSE_CHARACTERS} characters"
        raise wrong(argument, rule, purpose, str)
    return purpose


def check_ttl(ttl: object, argument: str, purpose: str = LOCK) -> None:
    if type(ttl) is not int or not 1 <= ttl <= limits.LONGEST_TTL_SECONDS:
        is_lock = purpose == LOCK
        cure = "a lock becomes free this long after its holder died" if is_lock else "leave it out for no expiry"
        rule = f"a whole number of seconds from 1 to {limits.LONGEST_TTL_SECONDS:,}"
        raise wrong(argument, rule, ttl, int, cure=f"; {cure}")


def check_number(number: object, argument: str, meaning: str, below: int = 2**63) -> None:
    """Refuse a number that is not a version or token that another call returned; `meaning` says which."""
    if number is not None and (type(number) is not int or not 0 <= number < below):
        raise wrong(argument, f"{meaning}, a whole number", number, int)


def check_dead_letter_id(name: object, argument: str = "id") -> str:
    """The id of a dead letter."""
    if type(name) is not str or _DEAD_LETTER_ID.fullmatch(name) is None:
        raise wrong(argument, "the id of a dead letter, 24 hexadecimal digits", name, str)
    return name


def milliseconds(argument: str, seconds: float) -> int:
    if type(seconds) not in (int, float) or not 0 < seconds <= limits.LONGEST_EXPIRY_SECONDS:
        rule = f"a number of seconds above 0, at most {limits.LONGEST_EXPIRY_SECONDS:,}"
        raise wrong(argument, rule, seconds, int, float)
    return max(1, round(seconds * 1000))
