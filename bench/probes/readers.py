"""What it takes to read a request of a service, per byte, beside msgspec's decoding of the same bytes.

The bound is 20 ns per byte or 1.5 times msgspec's time, whichever is more: no message holds up the others for long.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec

from bench.harness.figures import Figure, Row, ratio, within
from keyloft.errors import InvalidInput
from keyloft.plugins import wire as plugins
from keyloft.semantic import wire as semantic
from keyloft.semantic.keys import Project

LARGEST_VALUE, LARGEST_MESSAGE = 64_000, 1024 * 1024

_NANOSECONDS_PER_BYTE = 20
_TIMES_MSGSPEC = 1.5
_READS_PER_ROUND = 5
_NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_EVERY_CHARACTER = "".join(
    [
        rf"\u{code:04x}" if code < 0x20 or chr(code) in '"\\' else chr(code)
        for code in range(0x1_0000)
        if not 0xD800 <= code < 0xE000
    ]
)
_ITEMS: Mapping[str, bytes] = {
    "lists, 450 levels": b"[" * 450 + b"]" * 450,
    "lists, 899 levels": b"[" * 898 + b"]" * 898,
    "lists, 900 levels": b"[" * 899 + b"]" * 899,
    "lists, 901 levels": b"[" * 900 + b"]" * 900,
    "lists, 30,000 levels": b"[" * 30_000 + b"]" * 30_000,
    "empty lists": b"[]",
    "small lists": b"[1,2]",
    "objects": b'{"a":1,"b":2}',
    "objects with a name twice": b'{"a":1,"a":2}',
    "small ints": b"1",
    "ints of 18 digits": b"7" * 18,
    "ints of 30 digits": b"7" * 30,
    "ints of 255 digits": b"7" * 255,
    "ints of 256 digits": b"7" * 256,
    "ints of 4,000 digits": b"7" * 4000,
    "short floats": b"0.5",
    "floats of 30 digits": b"0." + b"1234567890" * 3,
    "floats of 900 digits": b"0." + b"123456789" * 100,
    "short strings": b'"a"',
    "short strings of brackets": b'"["',
    "long strings": b'"' + b"a" * 1000 + b'"',
    r"\u0041, one a string": rb'"\u0041"',
    r"\u0041, a hundred": b'"' + rb"\u0041" * 100 + b'"',
    r"\", one a string": rb'"\""',
    r"\", a hundred": b'"' + rb"\"" * 100 + b'"',
    r"\\, a hundred": b'"' + rb"\\" * 100 + b'"',
    "surrogate pairs": b'"' + rb"\ud83d\ude00" * 50 + b'"',
    "non-ASCII": '"жизнь 😀"'.encode(),
    "white space": b"1" + b" " * 50,
    "broken UTF-8 at the end": b'"a"',
    "1e400 at the end": b"0.5",
}


def reading(size: int, rounds: int) -> Row:
    """Requests of about so many bytes."""
    figures, verdicts = [], []
    for title, read, data in _requests(size):
        reader, decoder = _alternately((read, _decoded), data, rounds)
        bound = tuple(max(_NANOSECONDS_PER_BYTE, _TIMES_MSGSPEC * taken) for taken in decoder)
        keyloft = Figure(title, "ns per byte", reader)
        figures += [keyloft, ratio(keyloft, Figure("msgspec", "ns per byte", decoder))]
        verdicts.append(within(ratio(keyloft, Figure("its bound", "ns per byte", bound)), 1))
    return Row(f"reading requests of {size:,} bytes", figures=tuple(figures), verdicts=tuple(verdicts))


def _requests(size: int) -> Iterator[tuple[str, Callable[[bytes], object], bytes]]:
    project = Project("acme", "web")
    about = b'"expectedVersion":0,"lastWriter":"w","semantics":{"purpose":"config"}'
    operations: Mapping[str, tuple[Callable[[bytes], object], bytes, bytes]] = {
        "set": (lambda data: plugins.setting("trivia", data), b'{"key":"k","value":', b"}"),
        "set_many": (lambda data: plugins.setting_many("trivia", data), b'{"entries":{"k":', b"}}"),
        "get_many": (lambda data: plugins.getting_many("trivia", data), b'{"keys":', b"}"),
        "put": (lambda data: semantic.read("put", project, data), b'{"key":"k",%b,"value":' % about, b"}"),
        "batch": (
            lambda data: semantic.read("batch", project, data),
            b'{"operations":[{"operation":"put","key":"k",%b,"value":' % about,
            b"}]}",
        ),
    }
    for operation, (read, before, after) in operations.items():
        room = size - len(before) - len(after)
        for title, value in _values(room):
            yield f"{operation}: {title}", read, before + value + after
        for title, fields in _unknown_fields(room):
            yield f"{operation}: {title}", read, before + b"1," + fields + after


def _values(size: int) -> Iterator[tuple[str, bytes]]:
    for title, item in _ITEMS.items():
        value = b"[" + b",".join([item] * max(1, (size - 10) // (len(item) + 1))) + b"]"
        if title.endswith("at the end"):
            value = value[:-1] + (b",1e400]" if "1e400" in title else b',"\xff"]')
        yield title, value


def _unknown_fields(size: int) -> Iterator[tuple[str, bytes]]:
    short = ["".join(name) for name in itertools.islice(itertools.product(_NAME_CHARACTERS, repeat=3), size // 8)]
    for title, names in (
        ("unknown names of 3 characters", short),
        ("unknown names of 300 characters", [name * 100 for name in short[: size // 305]]),
        ("one unknown name", ["expectedVersion" * (size // 15 - 1)]),
        ("one unknown name of many characters", [_EVERY_CHARACTER[: size // 3]]),
        ("misspelt names", [f"_k_e_y_{name}" for name in short[: size // 15]]),
    ):
        yield title, ",".join([f'"{name}":1' for name in names]).encode()


def _decoded(data: bytes) -> object:
    return msgspec.json.decode(data)


def _alternately(
    readers: tuple[Callable[[bytes], object], ...], data: bytes, rounds: int
) -> tuple[tuple[float, ...], ...]:
    """Nanoseconds of the processor per byte, for each reader and round: the best of several, taken by turns."""
    best = []
    for _ in range(rounds):
        taken = [[_nanoseconds(read, data) / len(data) for read in readers] for _ in range(_READS_PER_ROUND)]
        best.append([min(of_one) for of_one in zip(*taken, strict=True)])
    return tuple(zip(*best, strict=True))


def _nanoseconds(read: Callable[[bytes], object], data: bytes) -> float:
    began = time.thread_time_ns()
    with contextlib.suppress(InvalidInput, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        read(data)
    return time.thread_time_ns() - began
