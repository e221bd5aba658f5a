"""A trivia game for a chat bot: a plugin in a process of its own, which keeps its data in Keyloft.

    python trivia.py [--nats nats://127.0.0.1:4222]

The bot sends what a player typed to `chat.trivia.<command>`, as `{"user": "alice", "text": "8"}`, and shows the reply.

    game             the game that is on, if there is one: its TTL ends it
    score:<player>   the points of a player, and what the last one is for

Start this program once: it is the only one that writes these keys, and carries out one command after the other, in the
order of their arrival.
"""

import argparse
import asyncio
import logging
import random
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypedDict, TypeVar

import msgspec
from nats.aio.msg import Msg

import keyloft
from keyloft.plugins import DatabaseClient

USAGE = "start: a new game · ask: the question again · answer <text> · scores"
NO_GAME = "There is no game. Begin one with: start"
GAME_SECONDS = 600  # without a right answer, then the game is over
PATIENCE_SECONDS = 10.0
QUESTIONS = [
    ("Which planet has the shortest day?", "Jupiter"),
    ("How many squares has a chessboard along one side?", "8"),
    ("Which metal is liquid at room temperature?", "Mercury"),
    ("Who wrote the first program for a computer?", "Ada Lovelace"),
    ("What is the capital of New Zealand?", "Wellington"),
    ("Which sea has no coast?", "Sargasso Sea"),
]

P = ParamSpec("P")
T = TypeVar("T")


class TriviaCommand(msgspec.Struct):
    """What a player typed after the command."""

    user: str
    text: str = ""


class Game(TypedDict):
    id: str
    left: list[int]  # the questions that are not answered yet; the first one is open
    winner: str | None  # who answered the one before


class Score(TypedDict):
    points: int
    last: str  # the game and the question that the last point is for


class Trivia:
    def __init__(self, client: DatabaseClient) -> None:
        self.kv = client.kv

    async def reply(self, message: Msg) -> str:
        try:
            command = msgspec.json.decode(message.data, type=TriviaCommand)
            match message.subject.rpartition(".")[2]:
                case "start":
                    return await self.start()
                case "ask":
                    return await self.ask()
                case "answer":
                    return await self.answer(command.user, command.text)
                case "scores":
                    return await self.scores()
        except keyloft.KeyloftError as error:
            return f"Sorry: {error}"
        except ValueError:
            pass  # not JSON, or without a user
        return USAGE

    async def start(self) -> str:
        game = await self._game()
        if game and game["left"]:
            return f"A game is on. {_question(game)}"
        order = random.sample(range(len(QUESTIONS)), len(QUESTIONS))
        game = Game(id=secrets.token_hex(8), left=order, winner=None)
        await patiently(self.kv.set, "game", game, ttl=GAME_SECONDS)
        return f"A new game! {_question(game)}"

    async def ask(self) -> str:
        game = await self._game()
        return _question(game) if game else NO_GAME

    async def answer(self, player: str, text: str) -> str:
        game = await self._game()
        if not game or not game["left"]:
            return NO_GAME
        if text.strip().casefold() != QUESTIONS[game["left"][0]][1].casefold():
            return f"No. {_question(game)}"
        await self._score(player)  # a name that can't be part of a key is refused here, before anything is decided
        # Two keys change, and there is no transaction over NATS: this write decides, the score follows from it. If the
        # plugin is killed in between, the next command gives the point.
        game = Game(id=game["id"], left=game["left"][1:], winner=player)
        await patiently(self.kv.set, "game", game, ttl=GAME_SECONDS)
        await self._give_point(game)
        return f"Right, {player}! {_question(game)}"

    async def scores(self) -> str:
        await self._game()
        players = [key.removeprefix("score:") for key in await patiently(self.kv.list, "score:")]
        points = [score["points"] for score in await asyncio.gather(*map(self._score, players))]
        best_first = sorted(zip(players, points, strict=True), key=lambda line: -line[1])
        return "\n".join([f"{points} {player}" for player, points in best_first]) or "Nobody has a point yet."

    async def _game(self) -> Game | None:
        game: Game | None = await patiently(self.kv.get, "game")
        if game:
            await self._give_point(game)
        return game

    async def _give_point(self, game: Game) -> None:
        """Give the point for the last answer, unless that was done: the score remembers what it last grew for."""
        if game["winner"] is None:
            return
        score, answered = await self._score(game["winner"]), f"{game['id']} {len(game['left'])}"
        if score["last"] != answered:
            score = Score(points=score["points"] + 1, last=answered)
            await patiently(self.kv.set, f"score:{game['winner']}", score)

    async def _score(self, player: str) -> Score:
        score: Score = await patiently(self.kv.get, f"score:{player}", default=Score(points=0, last=""))
        return score


def _question(game: Game) -> str:
    return QUESTIONS[game["left"][0]][0] if game["left"] else "That was the last question."


async def patiently(call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the storage; repeat the call for some seconds if the service does not answer, as during a restart."""
    # After TimedOut, the call may have been carried out. Repeating it does no harm: a get, or a set of the same value,
    # has the same effect once and twice, and no other program writes these keys.
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
    async with await DatabaseClient.connect(url, plugin_name="trivia", timeout=2) as client:
        subscription = await client.nats.subscribe("chat.trivia.*")
        trivia = Trivia(client)

        async def play() -> None:
            async for message in subscription.messages:
                reply = await trivia.reply(message)
                if message.reply:
                    await message.respond(reply.encode())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(play())
            logging.info("trivia: waiting for players")
            await ended.wait()
            # No new commands from here on; play() ends when those that arrived are answered.
            await subscription.drain()  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description="A trivia game for a chat bot.")
    parser.add_argument("--nats", default="nats://127.0.0.1:4222", metavar="URL")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        asyncio.run(run(parser.parse_args().nats))
    except keyloft.Unanswered as error:
        sys.exit(f"trivia: {error}")


if __name__ == "__main__":
    main()
