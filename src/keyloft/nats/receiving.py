"""Receives the bytes of a connection, and passes them directly to a parser as they arrive.

nats-server cuts off a connection that reads too slowly. So where the kernel can drop bytes, those of a message that was
refused when its first bytes arrived are not even copied.
"""

import asyncio
import contextlib
import mmap
import os
import socket
import sys
from time import thread_time
from typing import Any, Final, Protocol

from keyloft import limits

_CAN_DISCARD: Final = sys.platform == "linux"
"""Whether a TCP socket drops what is read with MSG_TRUNC, instead of copying it."""


class ByteParser(Protocol):
    """Makes messages of bytes."""

    unwanted: int
    """How many of the next bytes belong to a refused message, and must not be passed to the parser."""
    missing: memoryview
    """The memory for the next bytes, if they belong to a large message of which a part has arrived; empty otherwise."""

    def leave_out(self, count: int) -> None:
        """Note that so many unwanted bytes have arrived."""

    def fill(self, count: int) -> bool:
        """Note that so many missing bytes have arrived; returns what `take` does."""

    def take(self, data: bytes) -> bool:
        """Handle bytes; returns False if the parser has to wait for something, and takes no more bytes until then."""


class SocketReceiver(asyncio.BufferedProtocol):
    """Receives the bytes of a connection in place of its stream's protocol; everything else is passed on to it."""

    def __init__(self, stream: asyncio.StreamWriter, reader: asyncio.StreamReader, parser: ByteParser) -> None:
        """Replace the protocol of a stream. `reader` has the bytes that arrived before, and gets no more."""
        transport: Any = stream.transport  # the type in typeshed lacks the methods for reading
        self._transport = transport
        self._before: Any = self._transport.get_protocol()
        self._parser = parser
        self._loop = asyncio.get_running_loop()
        self._space = memoryview(bytearray(limits.NATS_READ_BYTES))
        self._discarding: socket.socket | None = None
        if _CAN_DISCARD:
            self._discarding = socket.socket(fileno=os.dup(stream.get_extra_info("socket").fileno()))
        self._nowhere = mmap.mmap(-1, limits.NATS_DISCARDED_BYTES)  # never written to, so it takes no memory
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._taken = 0.0
        self._is_paused = True
        self.is_over = False
        """Whether nothing more arrives."""
        self._transport.pause_reading()
        self._transport.set_protocol(self)
        reader.feed_eof()

    async def wait(self) -> None:
        """Receive until the parser has to wait for something, or nothing more arrives.

        Raises:
            Exception: What the parser has raised.
        """
        if self._error is None and not self.is_over:
            self._waiter = self._loop.create_future()
            self._resume()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._parser.unwanted:
            self._discard()
        return self._parser.missing or self._space

    def buffer_updated(self, nbytes: int) -> None:
        parser = self._parser
        if unwanted := min(parser.unwanted, nbytes):
            parser.leave_out(unwanted)
            if unwanted == nbytes:
                return
        is_done, began = False, thread_time()
        try:
            is_done = parser.fill(nbytes) if parser.missing else parser.take(bytes(self._space[unwanted:nbytes]))
        except Exception as error:
            self._error = error
        self._taken += thread_time() - began
        if not is_done:
            self._pause()
            self._wake()
        elif self._taken > limits.NATS_TAKING_SECONDS:
            # Without a pause, libuv reads as long as there is something: no other task would run meanwhile.
            self._taken = 0.0
            self._pause()
            self._loop.call_soon(self._go_on)

    def _discard(self) -> None:
        """Drop what has arrived of a refused message."""
        parser, discarding = self._parser, self._discarding
        if discarding is not None:
            # The transport will meet the same error, and report it.
            with contextlib.suppress(OSError):
                while parser.unwanted:
                    count = min(parser.unwanted, len(self._nowhere))
                    left_out = discarding.recv_into(self._nowhere, count, socket.MSG_TRUNC)
                    parser.leave_out(left_out)
                    if left_out < count:
                        break

    def _go_on(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._resume()

    def _pause(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Passed on to the stream, which still sends and closes

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()

    def eof_received(self) -> bool:
        self.is_over = True
        self._wake()
        return bool(self._before.eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True
        if self._discarding is not None:
            self._discarding.close()
            self._discarding = None
        self._wake()
        self._before.connection_lost(exc)
