"""nats-py's transport as Keyloft uses it: it reads more at once."""

from typing import Any

from nats.aio.transport import TcpTransport

from keyloft import limits
from keyloft.nats.receiving import ByteParser, SocketReceiver


class LargeReads(TcpTransport):
    """nats-py's transport with larger reads, which the parser can get directly, without a task."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._receiver: SocketReceiver | None = None

    def receive_for(self, parser: ByteParser) -> None:
        """Pass what arrives directly to a parser; with TLS, nats-py's reading task still does so."""
        writer, reader = self._io_writer, self._io_reader
        if self._receiver is not None or writer is None or reader is None or writer.is_closing():
            return
        if writer.get_extra_info("ssl_object") is None:
            self._receiver = SocketReceiver(writer, reader, parser)

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: int) -> None:
        self._receiver = None  # nats-py connects again with the same transport
        await super().connect(uri, limits.NATS_READ_BYTES, connect_timeout)

    async def connect_tls(self, uri: Any, ssl_context: Any, buffer_size: int, connect_timeout: int) -> None:
        try:
            await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        except BaseException:
            # The handshake has taken the connection from its stream, which would wait for its end for ever.
            self.close()  # type: ignore[no-untyped-call]
            self._io_writer = self._io_reader = None
            raise

    async def read(self, buffer_size: int) -> bytes:
        if self._receiver is not None and super().at_eof():  # type: ignore[no-untyped-call]
            await self._receiver.wait()
            return b""
        data: bytes = await super().read(limits.NATS_READ_BYTES)
        return data

    def at_eof(self) -> bool:
        is_over: bool = super().at_eof()  # type: ignore[no-untyped-call]
        return is_over and (self._receiver is None or self._receiver.is_over)
