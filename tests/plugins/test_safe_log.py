"""Log lines of a program that embeds the plugin service: safe with every handler, whatever plugins send."""

import json
import logging
from pathlib import Path

import nats
import pytest

from keyloft.plugins import BotDatabase, DatabaseService


async def test_log_lines_are_safe_for_every_handler(
    nats_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "keyloft")
    client = await nats.connect(nats_url)
    async with BotDatabase(tmp_path / "bot.db") as db, DatabaseService(client, db, prefixes=["safe-log"]):
        for text in ("\x1b[2J", "\x9b31m", "\x85", "\u2028", "\u202egpj", "\u200b"):
            for subject in (f"{text}.set", f"trivia.{text}", f"trivia.{text}.get"):
                reply = await client.request(f"safe-log.{subject}", b'{"key": "k", "value": 1}', timeout=20)
                assert json.loads(reply.data)["success"] is False
            for fields in ({"key": text}, {"key": f"a\nb {text}", text: 1}, {"key": [text]}, {text: 1}):
                for operation in ("get", "set", "delete", "list"):
                    asked = json.dumps({"value": 1, **fields}).encode()
                    await client.request(f"safe-log.trivia.{operation}", asked, timeout=20)
    await client.close()
    assert len(caplog.messages) > 70
    assert [message for message in caplog.messages if not message.isprintable()] == []
