"""Checks JSON texts and makes them compact, in a time that is linear in their bytes, whatever they hold.

msgspec reads and writes them. What msgspec does not check or support is done here with operations on the whole text,
which run at the speed of C: a name twice in one object, deep nesting, ints of any length, a caller's used-up stack.
"""

import gc
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import accumulate
from operator import add
from typing import Any, Final, TypeVar

import msgspec

from keyloft import limits
from keyloft.errors import InvalidArgument, InvalidJson, ValueTooLarge

S = TypeVar("S")
T = TypeVar("T")

skim = msgspec.json.Decoder(msgspec.Raw).decode
"""Checks that bytes are JSON, and returns them as they are. It overlooks invalid UTF-8, and too large numbers."""

_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode

_NEITHER_BRACKETS_NOR_QUOTES: Final = bytes(set(range(256)) - set(b'[]{}"'))
_QUOTES_AS_BITS: Final = bytes([ord("1") if byte == ord('"') else ord("0") for byte in range(256)])
_BRACKETS_AS_BITS: Final = bytes.maketrans(b"[{]}", b"1100")
_DIGITS_AS_ZEROS: Final = bytes([ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256)])
_LONG_DIGITS: Final = b"0" * limits.LONG_INT_DIGITS
_FLOATS_AS_INTS: Final = bytes([ord("1") if byte in b"0123456789." else byte for byte in range(256)])
_NO_PAUSE: Final = nullcontext()
_NOT_UTF8: Final = "Invalid JSON: it is not UTF-8 text"
_AT_BYTE: Final = re.compile(r"\(byte ([0-9]+)\)$")


def compact(data: bytes, most_levels: int) -> tuple[Any, bytes]:
    """What a JSON text holds, and its compact form, from which the same is read again.

    The compact form keeps all ints as they were written, and floats, too, if the text consists of short ones. In the
    first result, an int of LONG_INT_DIGITS or more is replaced by a stand-in of 21 digits: converting such an int would
    take a time that grows with the square of its digits.

    Raises:
        InvalidJson: The text is not JSON, or a name is twice in one object, so that one of the values would be lost.
        InvalidArgument: It is nested too deeply, or has a number out of a float's range, or is not Unicode text.
        ValueTooLarge: It has an int that alone is larger than a value may be.
    """
    # `bare` has the length of the text, but no escaped quotes within strings.
    bare = data.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in data else data
    if is_deeper(bare, most_levels):
        raise _too_deep(most_levels)
    short, long_ints, stand_in = _without_long_ints(data, bare)
    read = _read_floats if not long_ints and _has_short_floats(data) else _read_and_write
    try:
        content, text = on_any_stack(read, short)
    except msgspec.ValidationError:
        check_syntax(data)  # the decoder stopped at that number: the rest may not be JSON
        raise InvalidArgument("a value of the payload is out of the range of a float") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if long_ints:
            check_syntax(data)  # this error names the byte in the text as it was sent
        raise _malformed(data, error) from None
    if bare.count(b'"') != quotes(text):
        raise InvalidJson("Invalid JSON: a name is twice in one object")
    return content, _with_long_ints(text, long_ints, stand_in) if long_ints else text


def collecting_no_garbage(data: bytes) -> AbstractContextManager[None]:
    """Switch the garbage collector off while a long text is decoded, whose objects have no reference cycles.

    The collector would visit all lists and dicts of the text again and again while msgspec makes them.
    """
    return _NO_PAUSE if len(data) < limits.GC_PAUSE_BYTES or not gc.isenabled() else _collector_paused()


@contextmanager
def _collector_paused() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _read_and_write(data: bytes) -> tuple[Any, bytes]:
    content = _decode(data)
    return content, _encode(content)


def _has_short_floats(data: bytes) -> bool:
    """Whether a compact text, without escapes, consists mostly of short floats."""
    if len(data) < limits.GC_PAUSE_BYTES or data.count(b".") < len(data) // 8:
        return False
    return not any([byte in data for byte in (b"\\", b" ", b"\t", b"\r", b"\n")])


def _read_floats(data: bytes) -> tuple[Any, bytes]:
    """What `_read_and_write` returns, but with floats as they were written: writing floats takes most of the time.

    To find a name that is twice in one object, the text is read and written with an int instead of each float. Names
    that differ only in digits then seem to be the same; in that case everything is written after all.
    """
    content = _decode(data)
    # The int that replaces a float of very many digits can be out of range.
    with suppress(msgspec.ValidationError):
        if _encode(_decode(data.translate(_FLOATS_AS_INTS))).count(b'"') == data.count(b'"'):
            return content, data
    return content, _encode(content)


def check_syntax(data: bytes) -> None:
    """Refuse a text that is not JSON; numbers out of range, and names twice in one object, are not noticed."""
    if not is_utf8(data):
        raise InvalidJson(_NOT_UTF8)
    try:
        on_any_stack(skim, data)
    except msgspec.DecodeError as error:
        raise _malformed(data, error) from None


def is_json(data: bytes) -> bool:
    """Whether bytes are JSON in UTF-8 that callers can read: nested no deeper than a value may be."""
    if is_deeper(data, limits.PLUGIN_VALUE_DEPTH):
        return False
    try:
        check_syntax(data)
    except (InvalidJson, InvalidArgument):
        return False
    return True


def is_utf8(data: bytes) -> bool:
    try:
        return data.isascii() or bool(data.decode())
    except UnicodeDecodeError:
        return False


def check_depth(data: bytes, most_levels: int) -> None:
    """Refuse lists and dicts that nest deeper than this many levels."""
    if is_deeper(data, most_levels):
        raise _too_deep(most_levels)


def _too_deep(most_levels: int) -> InvalidArgument:
    levels = min(most_levels, limits.PLUGIN_VALUE_DEPTH)  # a payload has further levels around its values
    return InvalidArgument(f"the payload is nested too deeply; a value may have {levels} levels")


def _malformed(data: bytes, error: msgspec.DecodeError | UnicodeDecodeError) -> InvalidJson | InvalidArgument:
    if not is_utf8(data):
        return InvalidJson(_NOT_UTF8)
    if _has_lone_surrogate(data):
        return InvalidArgument("a value or name of the payload holds a lone surrogate, which is not Unicode text")
    end = "it ends too early" if data.strip() else "there is none"
    reason = str(error).removeprefix("JSON is malformed: ").replace("Input data was truncated", end)
    if found := _AT_BYTE.search(reason):
        for constant in ("NaN", "Infinity"):
            if data.startswith(constant.encode(), int(found[1])):
                reason = f"JSON has no {constant} {found[0]}"
    return InvalidJson(f"Invalid JSON: {reason}")


def _has_lone_surrogate(data: bytes) -> bool:
    """Whether a text is JSON except for a lone surrogate: without its surrogates, it can be read."""
    if b"\\ud" not in data and b"\\uD" not in data:
        return False
    try:
        on_any_stack(skim, data.replace(b"\\\\", b"__").replace(b"\\ud", b"\\u0").replace(b"\\uD", b"\\u0"))
    except msgspec.DecodeError:
        return False
    return True


def quotes(data: bytes) -> int:
    """How many quotes a JSON text has around its strings, names included: two for each."""
    if b"\\" not in data:
        return data.count(b'"')
    if b"\\\\" in data:
        data = data.replace(b"\\\\", b"")
    return data.count(b'"') - data.count(b'\\"')


# Nesting


def is_deeper(data: bytes, most_levels: int) -> bool:
    """Whether lists and dicts nest deeper in a JSON text than this many levels."""
    if len(data) <= most_levels:  # not 2 * most_levels: a text that is not JSON may leave its brackets open
        return False
    # `find` is several times as fast as `count`. The outermost bracket is the first character.
    brackets = 1 + sum([data.count(bracket) for bracket in (b"[", b"{") if data.find(bracket, 1) > 0])
    return brackets > most_levels and depth(data) > most_levels


def depth(data: bytes) -> int:
    """How deep lists and dicts nest in a JSON text."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = data.translate(None, _NEITHER_BRACKETS_NOR_QUOTES)
    # A string without brackets has become two quotes side by side.
    brackets = brackets.replace(b'""', b"")
    if b'"' in brackets:
        brackets = _outside_strings(brackets)
    bits = brackets.translate(_BRACKETS_AS_BITS) + b"0" * (-len(brackets) % 8)
    packed = int(b"0" + bits, 2).to_bytes(len(bits) // 8, "big")
    levels = accumulate(memoryview(packed.translate(_CHANGES)).cast("b"), initial=0)
    return max(map(add, levels, packed.translate(_PEAKS)), default=0)


def _bracket_tables() -> tuple[bytes, bytes]:
    """For each combination of eight brackets, one per bit: the change of the depth, and its highest point."""
    changes, peaks = bytearray(), bytearray()
    for bits in range(256):
        levels = list(accumulate([1 if bits & 1 << bit else -1 for bit in range(7, -1, -1)]))
        changes.append(levels[-1] % 256)
        peaks.append(max(0, *levels))
    return bytes(changes), bytes(peaks)


_CHANGES, _PEAKS = _bracket_tables()
# A bracket outside of strings is marked with 0; a bracket within a string, or a quote, with 1.
_UNMARKED: Final = bytes.maketrans(bytes([bracket ^ ord("0") for bracket in b"[]{}"]), b"[]{}")
_MARKED_INSIDE: Final = bytes([byte ^ ord("1") for byte in b'[]{}"'] + [ord('"') ^ ord("0")])


def _outside_strings(data: bytes) -> bytes:
    """The brackets outside of strings, of a text that consists of brackets and quotes.

    Each bit of `inside` becomes the parity of the quotes up to it, for all bits in a logarithmic number of steps.
    """
    size = len(data)
    inside, width = int(data.translate(_QUOTES_AS_BITS), 2), 1
    while width < size:
        inside ^= inside >> width
        width *= 2
    marks = format(inside, f"0{size}b").encode()
    marked = (int.from_bytes(data, "big") ^ int.from_bytes(marks, "big")).to_bytes(size, "big")
    return marked.translate(_UNMARKED, _MARKED_INSIDE)


# Long ints


def _without_long_ints(data: bytes, bare: bytes) -> tuple[bytes, list[bytes], bytes]:
    """The text with a stand-in for each long int, the digits of these ints, and the stand-in."""
    zeros = data.translate(_DIGITS_AS_ZEROS)
    if (start := zeros.find(_LONG_DIGITS)) < 0:
        return data, [], b""
    stand_in = b"%d" % random.randrange(10**20, 10**21)
    pieces: list[bytes] = []
    long_ints: list[bytes] = []
    quotes_before = counted = taken = 0
    while start >= 0:
        end = zeros.find(b" ", start)
        end = len(data) if end < 0 else end
        quotes_before += bare.count(b'"', counted, start)
        counted = start
        if quotes_before % 2 == 0 and _is_int(data, start, end):
            if end - start > limits.LONGEST_INT_DIGITS:
                raise ValueTooLarge(end - start, limits.LONGEST_INT_DIGITS)
            pieces += (data[taken:start], stand_in)
            long_ints.append(data[start:end])
            taken = end
        start = zeros.find(_LONG_DIGITS, end)
    return b"".join([*pieces, data[taken:]]), long_ints, stand_in


def _is_int(data: bytes, start: int, end: int) -> bool:
    """Whether digits are a whole int, and not part of a float, or of a text that is not JSON."""
    before = data[max(0, start - 2) : start]
    in_float = before.endswith((b".", b"e", b"E", b"+", b"e-", b"E-")) or data[end : end + 1] in (b".", b"e", b"E")
    return not in_float and not data.startswith(b"0", start)


def _with_long_ints(text: bytes, long_ints: list[bytes], stand_in: bytes) -> bytes:
    pieces = text.split(stand_in)
    whole = [b""] * (2 * len(pieces) - 1)
    whole[::2], whole[1::2] = pieces, long_ints
    return b"".join(whole)


# The stack


def on_any_stack(function: Callable[[S], T], argument: S) -> T:
    """Call a function that recurses; if the caller has used up most of its stack, in a thread with a stack of its own.

    Up to Python 3.11, msgspec and the caller's functions share one limit on recursion.
    """
    try:
        return function(argument)
    except RecursionError:
        pass
    done: list[T] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            done.append(function(argument))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
