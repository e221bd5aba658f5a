"""What each argument of the semantic store may be. Errors name the argument as a Python caller writes it."""

import math
import re
from typing import Final, TypeAlias

from keyloft import limits
from keyloft.core import values
from keyloft.errors import InvalidArgument, InvalidValue, ValueTooLarge

PURPOSES: Final = ("checkpoint", "feature_flag", "lock", "cursor", "config", "index_version")
"""The purposes that every store knows; `SemanticStore(kv, purposes=[…])` adds to them."""

LOCK: Final = "lock"

ExpectedVersion: TypeAlias = int | str
"""0: the key must have no entry; n: its entry must be version n; "*": either."""

ANY: Final = "*"

_PURPOSE: Final = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def value_json(value: object) -> bytes:
    """The stored form of a value.

    Raises:
        InvalidValue: It would not come back equal.
        ValueTooLarge: It takes more than 64 KiB.
    """
    try:
        data = values.encode_json(value, limits.SEMANTIC_VALUE_BYTES)
    except ValueTooLarge:
        raise
    except InvalidValue as error:
        raise type(error)(f"value: {error}") from error
    if len(data) > limits.SEMANTIC_VALUE_BYTES:
        raise ValueTooLarge(len(data), limits.SEMANTIC_VALUE_BYTES)
    return data


def check_text(content: object, argument: str, longest: int = limits.WRITER_CHARACTERS) -> str:
    """A text that fits into a line of a log."""
    if type(content) is not str or not content:
        raise InvalidArgument(f"{argument}: it must be a text that is not empty")
    if len(content) > longest:
        raise InvalidArgument(f"{argument}: it must have at most {longest} characters, not {len(content)}")
    if _UNPRINTABLE.search(content):
        raise InvalidArgument(f"{argument}: it must have no control characters and no lone surrogates")
    return content


def directive_of(writer: str) -> str:
    """The directive that a writer carries out; of a service account, its name."""
    return writer.partition(":")[2] or writer


def check_expected_version(version: object) -> int | None:
    """The version that an entry must have; 0 for no entry, None for any version or none."""
    if version == ANY and type(version) is str:
        return None
    if type(version) is not int or not 0 <= version < 2**63:
        kind = "a negative number" if type(version) is int else "null" if version is None else type(version).__name__
        raise InvalidArgument(
            "expected_version: the number 0 if the key must have no entry, the version that its entry must have, "
            f'or "*" for either; this is {kind}'
        )
    return version


def check_purpose(purpose: object) -> str:
    if type(purpose) is not str or _PURPOSE.fullmatch(purpose) is None or len(purpose) > limits.PURPOSE_CHARACTERS:
        raise InvalidArgument(
            f"semantics.purpose: a name of a-z 0-9 _, such as {', '.join(PURPOSES)}, "
            f"of at most {limits.PURPOSE_CHARACTERS} characters"
        )
    return purpose


def milliseconds(argument: str, seconds: float) -> int:
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf or seconds > limits.LONGEST_EXPIRY_SECONDS:
        raise InvalidArgument(f"{argument}: it must be a number of seconds above 0")
    return max(1, round(seconds * 1000))
