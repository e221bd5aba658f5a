"""Subscribes to a subject so that each message is handled as soon as it is read."""

import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

logger = logging.getLogger(__name__)


class _EachMessage:
    """Takes the place of a future, to which nats-py gives a single message: it passes on any number of them."""

    def __init__(self, deliver: Callable[[Msg], None]) -> None:
        self._deliver = deliver

    def cancelled(self) -> bool:
        return False

    def set_result(self, message: Msg) -> None:
        try:
            self._deliver(message)
        except Exception:
            logger.exception("NATS: a message could not be handled")


async def subscribe_at_once(connection: Nats, subject: str, deliver: Callable[[Msg], None]) -> Subscription:
    """Subscribe; `deliver` gets each message as soon as it is read, without nats-py's queue and task."""
    each: Any = _EachMessage(deliver)
    return await connection.subscribe(subject, future=each)
