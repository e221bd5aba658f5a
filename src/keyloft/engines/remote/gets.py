"""Sends concurrent gets together: a lone get as a request of its own, gets that wait meanwhile as one request."""

import asyncio
from collections import deque
from typing import TypeAlias

from keyloft import limits
from keyloft.core.records import Record
from keyloft.engines.remote.api import HttpApi
from keyloft.engines.remote.entries import record_of, text_of
from keyloft.engines.remote.errors import concerns_all
from keyloft.errors import InvalidArgument, KeyloftError

_WaitingGet: TypeAlias = tuple[bytes, "asyncio.Future[Record | None]"]


class GatheredGets:
    """Reads entries by their keys."""

    def __init__(self, api: HttpApi) -> None:
        self._api = api
        self._requests = 0
        self._waiting = deque[_WaitingGet]()
        self._is_scheduled = False
        self._tasks = set[asyncio.Task[None]]()

    async def get(self, key: bytes) -> Record | None:
        """The entry at a key."""
        if self._requests:
            return await self._gathered(key)
        self._requests += 1
        try:
            return await self._alone(key)
        finally:
            self._finished()

    async def get_many(self, keys: list[bytes]) -> list[Record | None]:
        """The entries at several keys, from one view.

        Raises:
            InvalidArgument: There are too many.
        """
        if len(keys) > limits.HTTP_CLIENT_KEYS:
            raise InvalidArgument(
                f"keys: over HTTP, at most {limits.HTTP_CLIENT_KEYS:,} are read as of one moment, got {len(keys):,}; "
                "read them in several calls"
            )
        found = await self._api.get_many([text_of(key) for key in keys])
        return [record_of(entry, key) for entry, key in zip(found.entries, keys, strict=True)]

    def _gathered(self, key: bytes) -> "asyncio.Future[Record | None]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Record | None] = loop.create_future()
        self._waiting.append((key, answer))
        if not self._is_scheduled and self._requests < limits.HTTP_CLIENT_GET_REQUESTS:
            self._is_scheduled = True
            loop.call_soon(self._send)  # not at once: the gets of other tasks come along
        return answer

    def _send(self) -> None:
        self._is_scheduled = False
        group = [self._waiting.popleft() for _ in range(min(len(self._waiting), limits.HTTP_CLIENT_GATHERED_GETS))]
        group = [(key, answer) for key, answer in group if not answer.done()]
        if group:
            self._requests += 1
            task = asyncio.create_task(self._answer_group(group), name="keyloft gets")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer_group(self, group: list[_WaitingGet]) -> None:
        try:
            await self._answer(group)
        except Exception as error:
            # An unexpected error: without this, the callers would see a cancellation that was not meant for them.
            for _, answer in group:
                _settle(answer, error)
        except BaseException:
            for _, answer in group:
                answer.cancel()
            raise
        finally:
            self._finished()

    async def _answer(self, group: list[_WaitingGet]) -> None:
        keys = [key for key, _ in group]
        try:
            records = await self.get_many(keys) if len(keys) > 1 else [await self._alone(keys[0])]
        except KeyloftError as error:
            if len(group) == 1 or concerns_all(error):
                for _, answer in group:
                    _settle(answer, error)
                return
            # One key may be refused or damaged, or all values together too large. Halving isolates that key.
            half = len(group) // 2
            await self._answer(group[:half])
            await self._answer(group[half:])
        else:
            for (_, answer), record in zip(group, records, strict=True):
                _settle(answer, record)

    async def _alone(self, key: bytes) -> Record | None:
        found = await self._api.get(text_of(key))
        return None if found is None else record_of(found, key)

    def _finished(self) -> None:
        self._requests -= 1
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send)


def _settle(answer: "asyncio.Future[Record | None]", outcome: Record | Exception | None) -> None:
    if answer.done():
        return  # its caller was cancelled
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
