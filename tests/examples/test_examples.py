"""The example plugins lose nothing and count nothing twice, whichever process is killed or restarted."""

import asyncio
import itertools
import json
import random
import re
import runpy
import shlex
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError

from keyloft.plugins import DatabaseClient
from tests.support.fork_server import ForkedProcess
from tests.support.nats import private_server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ANSWERS: dict[str, str] = dict(runpy.run_path(str(EXAMPLES / "trivia.py"))["QUESTIONS"])
LONGEST_SECONDS = 60
PLUGINS = ("trivia", "quotes")


class Chat:
    """A service, two plugins, and a bot that passes on to them what people say."""

    def __init__(self, url: str, bot: Client, folder: Path) -> None:
        self.url = url
        self._bot = bot
        self._folder = folder
        self._running: dict[str, ForkedProcess] = {}

    async def start(self, name: str) -> None:
        """Start the service or a plugin. It is not waited for: the plugins and the bot wait themselves."""
        if name == "service":
            command = ["-m", "keyloft", "serve", "--nats", self.url, "--database", "bot.db", "--http", "off"]
        else:
            # A busy machine may take longer to start a service than people in a chat would wait.
            patient = f"import {name}; {name}.PATIENCE_SECONDS = {LONGEST_SECONDS / 2}; {name}.main()"
            command = ["-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); {patient}", "--nats", self.url]
        with (self._folder / f"{name}.log").open("a") as log:
            self._running[name] = ForkedProcess(command, cwd=self._folder, stdout=log, stderr=log)

    async def end(self, name: str, by: signal.Signals) -> None:
        process = self._running.pop(name)
        process.send_signal(by)
        code = await asyncio.to_thread(process.wait, LONGEST_SECONDS)
        assert code == (-by if by == signal.SIGKILL else 0), (self._folder / f"{name}.log").read_text()

    async def restart(self, name: str, by: signal.Signals) -> None:
        await self.end(name, by)
        await self.start(name)

    async def aclose(self) -> None:
        for process in self._running.values():
            process.kill()
            await asyncio.to_thread(process.wait, LONGEST_SECONDS)

    async def send(self, plugin: str, command: str, data: bytes) -> str:
        """The reply of a plugin, as soon as there is a plugin."""
        async with asyncio.timeout(LONGEST_SECONDS):
            while True:
                try:
                    reply = await self._bot.request(f"chat.{plugin}.{command}", data, timeout=LONGEST_SECONDS)
                except NoRespondersError:  # no plugin has received it: it can be sent once more
                    await asyncio.sleep(0.01)
                else:
                    return reply.data.decode()

    async def say(self, user: str, plugin: str, command: str, text: str = "") -> str:
        return await self.send(plugin, command, json.dumps({"user": user, "text": text}).encode())

    async def stored(self, plugin: str, prefix: str) -> dict[str, Any]:
        async with await DatabaseClient.connect(self.url, plugin_name=plugin) as client:
            return {key: await client.kv.get(key) async for key in client.kv.list(prefix)}


@pytest.fixture
async def chat(tmp_path: Path) -> AsyncIterator[Chat]:
    async with private_server() as server, AsyncExitStack() as stack:
        bot = await nats.connect(server.url)
        stack.push_async_callback(bot.close)
        chat = Chat(server.url, bot, tmp_path)
        stack.push_async_callback(chat.aclose)
        for name in ("service", *PLUGINS):
            await chat.start(name)
        yield chat


class Crowd:
    """People who play and quote as fast as they can, and remember the replies."""

    def __init__(self, chat: Chat) -> None:
        self.points: Counter[str] = Counter()
        self.quotes: dict[int, str] = {}
        self.deleted: set[int] = set()
        self._chat = chat
        self._at_it = True

    async def play(self, user: str) -> None:
        while self._at_it:
            question = await self._chat.say(user, "trivia", "ask")
            if question not in ANSWERS:
                reply = await self._chat.say(user, "trivia", "start")
                assert reply.startswith(("A new game! ", "A game is on. ")), reply
                continue
            text = random.choice([ANSWERS[question], "no idea"])  # else it is always the same one who is first
            reply = await self._chat.say(user, "trivia", "answer", text)
            assert reply.startswith((f"Right, {user}! ", "No. ", "There is no game. ")), reply
            self.points[user] += reply.startswith("Right")

    async def quote(self, user: str) -> None:
        for saying in itertools.count():
            if not self._at_it:
                return
            text = f"{user}: saying {saying}"
            reply = await self._chat.say(user, "quotes", "add", text)
            added = re.fullmatch(r"Quote (\d+) is added\.", reply)
            assert added, reply
            number = int(added[1])
            assert number not in self.quotes, "a number was given twice"
            self.quotes[number] = text
            assert await self._chat.say(user, "quotes", "get", str(number)) == f"{number}. {text}"
            if random.random() < 0.2:
                reply = await self._chat.say(user, "quotes", "delete", str(number))
                assert reply == f"Quote {number} is deleted."
                self.deleted.add(number)

    async def goes_on(self) -> None:
        """Wait until there was some more of everything."""
        points, quotes = self.points.total() + 10, len(self.quotes) + 10
        await until(lambda: self.points.total() >= points and len(self.quotes) >= quotes)

    def leave(self) -> None:
        self._at_it = False


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_nothing_is_lost_or_counted_twice_through_restarts(chat: Chat) -> None:
    crowd = Crowd(chat)
    async with asyncio.TaskGroup() as people:
        for user in ("alice", "bob", "carol"):
            people.create_task(crowd.play(user))
            people.create_task(crowd.quote(user))
        await crowd.goes_on()
        await chat.restart("service", signal.SIGKILL)
        await crowd.goes_on()
        for name in PLUGINS:
            await chat.restart(name, signal.SIGTERM)
        await crowd.goes_on()
        await chat.end("service", signal.SIGKILL)
        for name in PLUGINS:  # what they were asked has to wait for a service
            people.create_task(chat.restart(name, signal.SIGINT))
        await chat.start("service")
        await crowd.goes_on()
        crowd.leave()

    scores = await chat.stored("trivia", "score:")
    assert {key: score["points"] for key, score in scores.items()} == {
        f"score:{user}": points for user, points in (+crowd.points).items()
    }
    quotes = await chat.stored("quotes", "quote:")
    assert {
        int(key.removeprefix("quote:")): f"{quote['author']}: {quote['text']}" for key, quote in quotes.items()
    } == {number: text for number, text in crowd.quotes.items() if number not in crowd.deleted}
    assert len(await chat.stored("quotes", "author:")) == len(quotes)


async def test_a_game_is_played(chat: Chat) -> None:
    assert await chat.say("alice", "trivia", "answer", "Jupiter") == "There is no game. Begin one with: start"
    assert await chat.say("alice", "trivia", "scores") == "Nobody has a point yet."
    question = (await chat.say("alice", "trivia", "start")).removeprefix("A new game! ")
    assert await chat.say("bob", "trivia", "start") == f"A game is on. {question}"
    assert await chat.say("bob", "trivia", "answer", "no idea") == f"No. {question}"
    for player in ("bob", "alice", "bob", "bob", "alice", "bob"):
        reply = await chat.say(player, "trivia", "answer", f" {ANSWERS[question].upper()} ")
        question = reply.removeprefix(f"Right, {player}! ")
        assert await chat.say("carol", "trivia", "ask") == question
    assert question == "That was the last question."
    assert await chat.say("carol", "trivia", "scores") == "4 bob\n2 alice"
    assert (await chat.say("carol", "trivia", "start")).startswith("A new game! ")


async def test_a_point_is_given_once_even_if_the_game_was_killed_before_giving_it(chat: Chat) -> None:
    async with await DatabaseClient.connect(chat.url, plugin_name="trivia") as client:
        await chat.say("alice", "trivia", "start")  # by now there is a service
        await client.kv.set("game", {"id": "g", "left": [1, 2], "winner": "alice"})
        assert await chat.say("bob", "trivia", "scores") == "1 alice"
        await chat.restart("trivia", signal.SIGKILL)
        assert await chat.say("bob", "trivia", "scores") == "1 alice"


async def test_quotes_are_added_found_and_deleted(chat: Chat) -> None:
    assert await chat.say("bob", "quotes", "random") == "There are no quotes yet."
    for number, line in enumerate(["Ada Lovelace: We may say: it weaves.", "ada: Hm.", "Alan: Instructions."], 1):
        assert await chat.say("bob", "quotes", "add", line) == f"Quote {number} is added."
    assert await chat.say("bob", "quotes", "search", "ADA") == "1. Ada Lovelace: We may say: it weaves.\n2. ada: Hm."
    assert await chat.say("bob", "quotes", "search", "a_a") == "Nobody of that name is quoted."
    assert await chat.say("bob", "quotes", "delete", "2") == "Quote 2 is deleted."
    for command in ("get", "delete"):
        assert await chat.say("bob", "quotes", command, "2") == "There is no quote 2."
    assert await chat.say("bob", "quotes", "search", "ada") == "1. Ada Lovelace: We may say: it weaves."
    assert await chat.say("bob", "quotes", "random") in {
        "1. Ada Lovelace: We may say: it weaves.",
        "3. Alan: Instructions.",
    }
    assert await chat.say("bob", "quotes", "add", "Alan: More.") == "Quote 4 is added.", "numbers are not used again"


async def test_what_makes_no_sense_is_answered_and_does_no_harm(chat: Chat) -> None:
    for plugin in PLUGINS:
        usage = await chat.say("bob", plugin, "help")
        assert " · " in usage
        for data in (b"", b"{", b"[]", b'{"text": "x"}', b'{"user": 1}', b"\xff", b'{"user": "\xff"}'):
            for command in ("answer", "add", "help"):
                assert await chat.send(plugin, command, data) == usage
    for text in ("", "x", "9" * 5000, "no one said", ": nothing", "nothing:"):
        for command in ("add", "get", "delete"):
            assert await chat.say("bob", "quotes", command, text) == usage
    assert (await chat.say("bob", "quotes", "add", f"{'x' * 300}: y")).startswith("Sorry: key must be ≤255 characters")
    assert (await chat.say("bob", "quotes", "add", f"x: {'y' * 65_536}")).startswith("Sorry: value size exceeds 64KB")
    assert await chat.send("quotes", "search", b'{"user": "bob", "text": "\\ud800"}')
    assert await chat.say("bob", "quotes", "search", "x") == "Nobody of that name is quoted."


async def test_a_name_that_no_key_can_hold_does_not_stop_the_game(chat: Chat) -> None:
    question = (await chat.say("alice", "trivia", "start")).removeprefix("A new game! ")
    for name in ("x" * 300, "nul\0"):
        assert (await chat.say(name, "trivia", "answer", ANSWERS[question])).startswith("Sorry: key must")
    assert (await chat.say("alice", "trivia", "answer", ANSWERS[question])).startswith("Right, alice! ")
    assert await chat.say("alice", "trivia", "scores") == "1 alice"


async def test_the_chat_commands_of_the_readme_work(chat: Chat) -> None:
    lines = re.findall(r"^\.venvs/server/bin/python (examples/say\.py .*)$", (EXAMPLES / "README.md").read_text(), re.M)
    assert {shlex.split(line)[2] for line in lines} == set(PLUGINS)
    await asyncio.gather(*[chat.say("bob", plugin, "help") for plugin in PLUGINS])  # by now they listen
    for line in lines:
        program, *words = shlex.split(line)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, program, "--nats", chat.url, *words), cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(LONGEST_SECONDS):
            output, _ = await process.communicate()
        assert process.returncode == 0
        assert not re.search(r"^Sorry| · |^There is no", output.decode()), f"{line}: {output.decode()}"
