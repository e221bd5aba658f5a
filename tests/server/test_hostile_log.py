"""The log of `keyloft serve` while senders put commands for a terminal into all that they may choose."""

import json
import re
from pathlib import Path

import nats
import pytest

from tests.server.test_serve import serving
from tests.support.nats import settled

pytestmark = pytest.mark.slow

# A subject carries everything but white space of ASCII and the separators of its parts.
HOSTILE = ["\x1b[2J\x1b[H", "\x9b31m", "\x07", "\x7f", "\x85", "\u2028", "\u202egpj", "\u2066", "\u200b", "\U000e0041"]
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) \[[\w.]+\] ")


@pytest.mark.parametrize("form", ["text", "json"])
async def test_no_sender_writes_to_the_terminal_or_forges_a_line(tmp_path: Path, form: str) -> None:
    async with serving(tmp_path, "--nats-port", "0", "--log-level", "debug", "--log-format", form) as served:
        start = len(served.log)
        client = await nats.connect(served.nats)
        forged = "k\n2026-03-01 10:30:45 INFO [keyloft.server.app] all is well"
        for text in [*HOSTILE, "é", "plain"]:
            for subject in (
                f"db.kv.{text}.set",
                f"db.kv.trivia.{text}",
                f"db.semantic.{text}.web.put",
                f"db.semantic.acme.{text}.put",
                f"db.semantic.acme.web.{text}",
            ):
                reply = await client.request(subject, b"{}", timeout=20)
                assert json.loads(reply.data)["success"] is False
            for key in (text, forged + text, f"two {text}"):
                for operation, fields in (("set", {"value": "confidential"}), ("get", {}), ("delete", {text: 1})):
                    asked = json.dumps({"key": key, **fields}).encode()
                    await client.request(f"db.kv.trivia.{operation}", asked, timeout=20)
            put = {"key": "docs/x", "value": "confidential", "expectedVersion": 1, "semantics": {"purpose": "cursor"}}
            for fields in ({"lastWriter": f"a:{text} b"}, {"lastWriter": "a:b", "requestId": f"r version=1{text}"}):
                await client.request("db.semantic.acme.web.put", json.dumps({**put, **fields}).encode(), timeout=20)
        await settled(client)
        await client.close()
        lines = served.log[start:].split("\n")[:-1]
    assert len(lines) > 12 * len(HOSTILE)
    assert [line for line in lines if not line.isprintable()] == []
    assert "confidential" not in served.log
    if form == "text":
        assert [line for line in lines if not LINE.match(line)] == []
        assert any("key=plain " in line for line in lines)
        assert any("key='two plain' " in line for line in lines)
    else:
        assert any(json.loads(line).get("key") == HOSTILE[0] for line in lines)
