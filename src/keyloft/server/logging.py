"""The log of a service: lines of text for people, or of JSON for machines."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from keyloft.core.log_text import printable, printable_json

_USUAL: Final = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "time", "level", "logger"}
"""The fields that every record has, or that every line has under another name."""


def set_up_logging(level: str, form: str) -> None:
    """Write the log to standard error: Keyloft's lines from this level on, other libraries' from WARNING on."""
    # No line shows the thread or the process, and looking them up takes time for every line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("keyloft").setLevel(level.upper())


class TextLines(logging.Formatter):
    """Lines for people: `2025-11-22 10:30:45 DEBUG [keyloft.plugins.service] …`, in local time."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s [%(name)s] %(message)s", "%Y-%m-%d %H:%M:%S")
        self._second, self._shown_second = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        if int(record.created) != self._second:
            self._second, self._shown_second = int(record.created), self.formatTime(record, self.datefmt)
        record.asctime = self._shown_second
        # A message may contain text that a plugin sent: it must not forge a line of the log, nor move the cursor.
        lines = [printable(self.formatMessage(record))]
        if record.exc_info:
            lines += _indented(self.formatException(record.exc_info))
        if record.stack_info:
            lines += _indented(record.stack_info)
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """Lines for machines: one JSON object each, with the fields of the record (operation, plugin, key, …)."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return printable_json(_to_json(line))


def _indented(text: str) -> list[str]:
    """The lines of a traceback. What follows a line break in an error's message must not begin a line of the log."""
    return [f"    {printable(line)}" for line in text.split("\n")]


def _to_json(line: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(line, enc_hook=str).decode()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # A lone surrogate, for example.
        return msgspec.json.encode({printable(name): ascii(value) for name, value in line.items()}).decode()
