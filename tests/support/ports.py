"""Ports for servers that a test has to name before they listen."""

import random
import socket
from contextlib import suppress

_chance = random.SystemRandom()  # workers must not choose the same ones


def free_port() -> int:
    """A port on which no program listens.

    It is below those that the system gives to connections, so that none of them takes it before the server does.
    """
    while True:
        port = _chance.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            return port
