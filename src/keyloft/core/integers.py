"""Integers of thousands of digits as text and back, without Python's limit and in less than quadratic time.

Python's own conversion takes quadratic time, half a minute for a million digits. Therefore it has a limit, 4300 digits
by default and 640 at the lowest. Here both directions divide and conquer, which takes under a second for a million.
"""

import decimal
from typing import Final

SHORT_BITS: Final = 2000
"""Up to this many bits, Python converts an int whatever its limit is set to."""

_SHORT_DIGITS: Final = 600
_DIGITS_PER_BIT: Final = 0.30102999


def digits_at_least(number: int) -> int:
    """A close lower bound of how many digits a number has."""
    return int((number.bit_length() - 1) * _DIGITS_PER_BIT) + 1


def write(number: int) -> str:
    """The decimal digits of an int."""
    exact = decimal.Context(prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, traps=[decimal.Inexact])
    with decimal.localcontext(exact):
        powers: dict[int, decimal.Decimal] = {}

        def halved(part: int, bits: int) -> decimal.Decimal:
            if bits <= SHORT_BITS:
                return decimal.Decimal(part)
            low = bits // 2
            if low not in powers:
                powers[low] = decimal.Decimal(2) ** low
            high = part >> low
            return halved(high, bits - low) * powers[low] + halved(part - (high << low), low)

        digits = str(halved(abs(number), number.bit_length()))
    return f"-{digits}" if number < 0 else digits


def parse(text: str) -> int:
    """The int that decimal digits stand for."""
    powers: dict[int, int] = {}

    def halved(digits: str) -> int:
        if len(digits) <= _SHORT_DIGITS:
            return int(digits)
        low = len(digits) // 2
        if low not in powers:
            powers[low] = 5**low
        return ((halved(digits[:-low]) * powers[low]) << low) + halved(digits[-low:])

    return -halved(text[1:]) if text.startswith("-") else halved(text)
