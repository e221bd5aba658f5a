"""Plays the chat bot: sends a plugin what a user typed, and prints the reply.

python say.py [--nats nats://127.0.0.1:4222] alice trivia answer Jupiter
"""

import argparse
import asyncio
import json
import sys

import nats
import nats.errors

LONGEST_SECONDS = 60


async def ignore(error: Exception) -> None:
    """nats-py would print a traceback for each attempt to connect."""


async def say(url: str, user: str, plugin: str, command: str, text: str) -> str:
    try:
        bot = await asyncio.wait_for(nats.connect(url, error_cb=ignore), 3)
    except TimeoutError:
        sys.exit(f"no NATS server answers at {url}: scripts/serve starts one")
    try:
        message = json.dumps({"user": user, "text": text}).encode()
        return (await bot.request(f"chat.{plugin}.{command}", message, timeout=LONGEST_SECONDS)).data.decode()
    except nats.errors.NoRespondersError:
        sys.exit(f"no plugin {plugin} is running: start examples/{plugin}.py")
    finally:
        await bot.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Say something to a plugin.")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", metavar="URL")
    parser.add_argument("user")
    parser.add_argument("plugin")
    parser.add_argument("command")
    parser.add_argument("text", nargs="*")
    given = parser.parse_args()
    sys.stdout.write(asyncio.run(say(given.nats, given.user, given.plugin, given.command, " ".join(given.text))) + "\n")


if __name__ == "__main__":
    main()
