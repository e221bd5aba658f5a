"""Calls the function that commits behind a pooler, in one message of the protocol and so in one transaction.

With bound arguments a statement takes two messages, and a pooler may send the second one to another session. Within
BEGIN and COMMIT it would hold its locks while the server waits for this process. So the arguments are written as
literals, and the answer comes as a notice: the driver drops the rows of a statement without bindings.
"""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Final

from keyloft.engines.postgres import function

_SETTINGS: Final = (
    "PERFORM set_config('client_min_messages', 'notice', true); "
    "PERFORM set_config('array_nulls', 'on', true) WHERE current_setting('array_nulls', true) = 'off'"
)


async def call(connection: Any, name: str, arguments: Mapping[str, Any]) -> list[int] | None:
    """The answer of the function of this name; None if it was lost, so that the outcome of the commit is unknown."""
    token = f"keyloft_{secrets.token_hex(8)}"
    answers: list[list[int]] = []

    def on_notice(_: Any, notice: Any) -> None:
        sender, _, answer = str(notice.message).partition(" ")
        if sender == token:
            answers.append([int(number) for number in answer.strip("{}").split(",")])

    literals = ", ".join(
        [f"{argument} => {literal(value)}::{function.TYPES[argument]}" for argument, value in arguments.items()]
    )
    connection.add_log_listener(on_notice)
    try:
        await connection.execute(
            f"DO ${token}$ BEGIN {_SETTINGS}; RAISE NOTICE '{token} %', {name}({literals}); END ${token}$"
        )
        await asyncio.sleep(0)  # notices are delivered by callbacks
    finally:
        connection.remove_log_listener(on_notice)
    return answers[0] if answers else None


def literal(value: Any) -> str:
    """SQL for a value, or for an array of values."""
    if value is None:
        return "NULL"
    if isinstance(value, (list, tuple)):
        return _quoted("{" + ",".join([element(each) for each in value]) + "}")
    if isinstance(value, bytes):
        return _quoted(rf"\x{value.hex()}")
    return _quoted(value) if isinstance(value, str) else str(value)


def element(value: Any) -> str:
    """A value as the text of an array has it."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return rf'"\\x{value.hex()}"'
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)


def _quoted(text: str) -> str:
    # With E, a backslash has the same meaning whatever standard_conforming_strings says.
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'"
