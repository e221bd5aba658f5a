"""A TCP proxy before a server, which can cut connections before an answer, and pass answers on byte by byte."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class CuttingProxy:
    """Passes bytes on, until it is asked not to."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self.answers_to_cut = 0
        """So many answers are not passed on: the connection ends instead."""
        self.cut = 0
        """How many were cut."""
        self.trickles = False
        """Whether answers are passed on byte by byte."""
        self._writers = set[asyncio.StreamWriter]()

    def cut_all(self) -> None:
        """End all connections now."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._to)
            self._writers |= {writer, to_writer}
            try:
                await asyncio.gather(self._pass(reader, to_writer), self._pass(to_reader, writer, is_answer=True))
            finally:
                self._writers -= {writer, to_writer}
                for end in (writer, to_writer):
                    end.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool = False
    ) -> None:
        while piece := await reader.read(2**16):
            if is_answer and self.answers_to_cut:
                self.answers_to_cut -= 1
                self.cut += 1
                raise ConnectionResetError
            for part in [bytes([byte]) for byte in piece] if is_answer and self.trickles else [piece]:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
        raise ConnectionResetError


@asynccontextmanager
async def cutting_proxy(port: int) -> AsyncIterator[CuttingProxy]:
    """A proxy before a port of loopback."""
    proxy = CuttingProxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut_all()
        await server.wait_closed()
