"""A quote database for a chat bot: a plugin in a process of its own, which keeps its data in Keyloft.

    python quotes.py [--nats nats://127.0.0.1:4222]

The bot sends what a user typed to `chat.quotes.<command>`, as `{"user": "alice", "text": "7"}`, and shows the reply.

    quote:000007        {"author": …, "text": …, "by": …}; padded, so that the order of keys is that of numbers
    author:ada:000007   finds the quotes of an author by prefix
    next                the number of the next quote

Start this program once: it is the only one that writes these keys. Within it, `writing` lets one command at a time
change something; those that only read don't wait for each other.
"""

import argparse
import asyncio
import logging
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import msgspec
from nats.aio.msg import Msg

import keyloft
from keyloft.plugins import DatabaseClient

USAGE = "add <author>: <text> · get <number> · random · search <author> · delete <number>"
SHOWN = 10
PATIENCE_SECONDS = 10.0

P = ParamSpec("P")
T = TypeVar("T")


class QuoteCommand(msgspec.Struct):
    """What a user typed after the command."""

    user: str
    text: str = ""


class Quotes:
    def __init__(self, client: DatabaseClient) -> None:
        self.kv = client.kv
        self.writing = asyncio.Lock()

    async def reply(self, message: Msg) -> None:
        text = await self._carry_out(message)
        if message.reply:
            await message.respond(text.encode())

    async def _carry_out(self, message: Msg) -> str:
        try:
            command = msgspec.json.decode(message.data, type=QuoteCommand)
            match message.subject.rpartition(".")[2]:
                case "add":
                    return await self.add(command.user, command.text)
                case "get":
                    return await self.get(int(command.text))
                case "random":
                    return await self.random()
                case "search":
                    return await self.search(command.text)
                case "delete":
                    return await self.delete(int(command.text))
        except keyloft.KeyloftError as error:
            return f"Sorry: {error}"
        except ValueError:
            pass  # not a number, not JSON, or without a user
        return USAGE

    async def add(self, user: str, line: str) -> str:
        author, _, text = [part.strip() for part in line.partition(":")]
        if not author or not text:
            return USAGE
        async with self.writing:
            # Three keys change, and there is no transaction over NATS. If the plugin is killed in between, this
            # order leaves a number that is never used, or one that a search skips; never two quotes with one number.
            number: int = await patiently(self.kv.get, "next", default=1)
            await patiently(self.kv.set, "next", number + 1)
            await patiently(self.kv.set, _author_key(author, number), number)
            await patiently(self.kv.set, _key(number), {"author": author, "text": text, "by": user})
        return f"Quote {number} is added."

    async def get(self, number: int) -> str:
        quote = await patiently(self.kv.get, _key(number))
        return _shown(number, quote) if quote else f"There is no quote {number}."

    async def random(self) -> str:
        keys = await patiently(self.kv.list, "quote:")
        return await self.get(_number(random.choice(keys))) if keys else "There are no quotes yet."

    async def search(self, author: str) -> str:
        found = await patiently(self.kv.list, f"author:{author.strip().casefold()}", limit=SHOWN)
        numbers = [_number(key) for key in found]
        quotes = await asyncio.gather(*[patiently(self.kv.get, _key(number)) for number in numbers])
        lines = [_shown(number, quote) for number, quote in zip(numbers, quotes, strict=True) if quote]
        return "\n".join(lines) or "Nobody of that name is quoted."

    async def delete(self, number: int) -> str:
        async with self.writing:
            # A repeated delete() may return False because the first one was carried out: so read first.
            quote = await patiently(self.kv.get, _key(number))
            if not quote:
                return f"There is no quote {number}."
            await patiently(self.kv.delete, _key(number))
            await patiently(self.kv.delete, _author_key(quote["author"], number))
        return f"Quote {number} is deleted."


def _key(number: int) -> str:
    return f"quote:{number:06}"


def _author_key(author: str, number: int) -> str:
    return f"author:{author.casefold()}:{number:06}"


def _number(key: str) -> int:
    return int(key.rpartition(":")[2])


def _shown(number: int, quote: dict[str, Any]) -> str:
    return f"{number}. {quote['author']}: {quote['text']}"


async def patiently(call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the storage; repeat the call for some seconds if the service does not answer, as during a restart."""
    # After TimedOut, the call may have been carried out. Repeating it does no harm: a get, a delete, or a set of the
    # same value has the same effect once and twice, and no other program writes these keys.
    give_up = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while True:
        try:
            return await call(*args, **kwargs)
        except (keyloft.NoService, keyloft.TimedOut, keyloft.Busy):
            if asyncio.get_running_loop().time() > give_up:
                raise
            await asyncio.sleep(0.2)


async def run(url: str) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    # In a chat, two seconds are a long time; the storage answers in milliseconds.
    async with await DatabaseClient.connect(url, plugin_name="quotes", timeout=2) as client:
        subscription = await client.nats.subscribe("chat.quotes.*")
        quotes = Quotes(client)

        async def listen() -> None:
            async for message in subscription.messages:
                tasks.create_task(quotes.reply(message))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(listen())
            logging.info("quotes: waiting for users")
            await ended.wait()
            # No new commands from here on; the group ends when those that arrived are answered.
            await subscription.drain()  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description="A quote database for a chat bot.")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", metavar="URL")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        asyncio.run(run(parser.parse_args().nats))
    except keyloft.Unanswered as error:
        sys.exit(f"quotes: {error}")


if __name__ == "__main__":
    main()
