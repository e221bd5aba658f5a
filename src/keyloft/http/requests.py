"""One HTTP request as the handlers of routes see it: path, query, headers, body, and who sent it."""

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import msgspec

from keyloft import limits
from keyloft.core.json_text import check_syntax, on_any_stack
from keyloft.errors import InvalidArgument, ValueTooLarge
from keyloft.http.body_errors import body_error
from keyloft.http.problems import Problem
from keyloft.http.replies import AsgiReceive, AsgiScope, AsgiSend, Headers

if TYPE_CHECKING:
    from keyloft.http.tokens import AccessToken

_TRUTHS = {"true": True, "1": True, "": True, "false": False, "0": False}


class ClientGone(Exception):
    """The client has hung up before its request was complete."""


class HttpRequest:
    """A request. Its path and its path parameters are not decoded."""

    __slots__ = ("_query", "_receive", "headers", "method", "origin_headers", "scope", "send", "token")

    def __init__(
        self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend, token: "AccessToken", origin_headers: Headers = ()
    ) -> None:
        """`origin_headers` are those that an answer needs for the web page that sent the request."""
        self.scope = scope
        self.method: str = scope["method"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.send = send
        self.token = token
        self.origin_headers = origin_headers
        self._receive = receive
        self._query: dict[str, list[str]] | None = None

    def parameter(self, name: str) -> str | None:
        """A parameter of the route's path, not decoded."""
        found: str | None = self.scope["path_params"].get(name)
        return found

    def header(self, name: bytes) -> str | None:
        """A header, by its name in lower case.

        Raises:
            Problem: The header is there twice, so that two readers could read it differently.
        """
        return header_of(self.headers, name)

    @property
    def query(self) -> dict[str, list[str]]:
        """The parameters after the question mark, decoded.

        Raises:
            InvalidArgument: They are not UTF-8, or there are too many.
        """
        if self._query is None:
            self._query = {}
            try:
                pairs = parse_qsl(
                    self.scope["query_string"].decode("ascii"),
                    keep_blank_values=True,
                    errors="strict",
                    max_num_fields=limits.HTTP_QUERY_FIELDS,
                )
            except ValueError:  # a UnicodeDecodeError is one, too
                raise InvalidArgument(
                    f"query: expected at most {limits.HTTP_QUERY_FIELDS} parameters, in UTF-8 with percent signs"
                ) from None
            for name, value in pairs:
                self._query.setdefault(name, []).append(value)
        return self._query

    def expect_query(self, *names: str) -> None:
        """Refuse parameters that the route does not have: a mistyped one would be ignored otherwise."""
        if not self.scope["query_string"]:
            return
        for name in self.query:
            if name not in names:
                known = f"it takes {', '.join(names)}" if names else "it takes none"
                raise InvalidArgument(f"query: this path has no parameter {name[:40]!a}; {known}")

    def one(self, name: str) -> str | None:
        """A parameter of the query that may be given once."""
        found = self.query.get(name)
        if found is None:
            return None
        if len(found) > 1:
            raise InvalidArgument(f"{name}: expected once, got {len(found)} times")
        return found[0]

    def flag(self, name: str) -> bool:
        """A parameter of the query that is true or false; false if it is left out."""
        text = self.one(name)
        if text is None:
            return False
        if text not in _TRUTHS:
            raise InvalidArgument(f"{name}: expected true or false")
        return _TRUTHS[text]

    def number(self, name: str, default: int, most: int) -> int:
        """A parameter of the query that is a whole number from 1 on."""
        text = self.one(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 20 and 1 <= int(text) <= most):
            raise InvalidArgument(f"{name}: expected a whole number from 1 to {most:,}")
        return int(text)

    async def body(self, most: int) -> bytes:
        """All of the body.

        Raises:
            Problem: It is compressed.
            ValueTooLarge: It has more than `most` bytes; no more of it than that was read.
            Busy: Too many large bodies arrive at a time.
            ClientGone: The client hung up before all of it arrived.
        """
        self._check_encoding()
        declared = self.header(b"content-length")
        if declared is not None and int(declared) > most:  # uvicorn has checked that it is a number
            raise too_large(int(declared), most)
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        first: bytes = message["body"]
        if not message["more_body"] and len(first) <= most:
            return first
        with self.scope["connection"].server_state.arriving(most if declared is None else int(declared)):
            parts, size = [first], len(first)
            while size <= most and message["more_body"]:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message["body"])
                size += len(message["body"])
            if size > most:
                raise too_large(size, most)
            return b"".join(parts)

    def _check_encoding(self) -> None:
        """Refuse a compressed body, which would be stored as sent, and a body that the parser would not see."""
        for name, value in self.headers:
            if name == b"upgrade":
                raise Problem(400, "BAD_REQUEST", "Upgrade: a request with a body can't ask for another protocol")
            if (name == b"content-encoding" and value.lower() != b"identity") or (
                name == b"transfer-encoding" and value.lower() != b"chunked"
            ):
                shown = name.decode().title()
                raise Problem(
                    415, "UNSUPPORTED_MEDIA_TYPE", f"{shown}: compressed bodies are not accepted; leave this header out"
                )

    def must_wait(self) -> bool:
        """Whether clients have left too many large answers unread to make another one."""
        is_full: bool = self.scope["connection"].server_state.is_full()
        return is_full

    async def room(self) -> None:
        """Wait while clients leave too many large answers unread to make another one."""
        await self.scope["connection"].server_state.room()

    async def wait_for_end(self) -> None:
        """Return when the client has hung up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def content_type(self) -> str:
        """The type of the body, in lower case and without parameters; empty if there is none."""
        return (self.header(b"content-type") or "").partition(";")[0].strip().lower()

    def wrong_type(self, expected: str) -> Problem:
        """The refusal of a body of another type than these."""
        hint = ""
        if self.content_type() == "application/x-www-form-urlencoded":
            hint = ", got a form, as `curl -d` declares every body: add -H 'Content-Type: application/json'"
        return Problem(415, "UNSUPPORTED_MEDIA_TYPE", f"Content-Type: expected {expected}{hint}")

    async def message(self, kind: type[msgspec.Struct], most: int) -> msgspec.Struct:
        """The body, JSON that has the fields of a struct.

        Raises:
            InvalidJson: It is not JSON.
            InvalidInput: It lacks a field, or one is of the wrong type or unknown.
        """
        if self.content_type() not in ("application/json", ""):
            raise self.wrong_type("application/json")
        return read_message(await self.body(most), kind)


def header_of(headers: list[tuple[bytes, bytes]], name: bytes) -> str | None:
    """A header, by its name in lower case.

    Raises:
        Problem: The header is there twice.
    """
    found: bytes | None = None
    for each, value in headers:
        if each == name:
            if found is not None:
                raise Problem(400, "BAD_REQUEST", f"{name.decode('latin-1')}: expected once, got several times")
            found = value
    return None if found is None else found.decode("latin-1")


def too_large(size: int, most: int) -> ValueTooLarge:
    return ValueTooLarge(size, most, f"body: {size:,} bytes, and the limit is {most:,}")


def read_message(data: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """JSON that has the fields of a struct.

    Raises:
        InvalidJson: It is not JSON.
        InvalidInput: It lacks a field, or one is of the wrong type or unknown.
    """
    try:
        return _decoded(data, kind)
    except RecursionError:
        raise InvalidArgument(f"body: nested too deeply; a value may have {limits.VALUE_DEPTH} levels") from None


def _decoded(data: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return on_any_stack(msgspec.json.Decoder(kind).decode, data)
    except msgspec.ValidationError as error:
        check_syntax(data)
        raise body_error(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        check_syntax(data)
        raise InvalidArgument("body: a text in it is not Unicode") from None
