"""The audit log of HTTP: who wrote what, and who read values with an admin token; never a value."""

import logging
from collections.abc import Iterable
from time import time
from typing import Final

from keyloft.http.tokens import AccessToken

logger: Final = logging.getLogger("keyloft.audit")

_FIELDS: Final = vars(logging.LogRecord(logger.name, logging.INFO, __file__, 0, "", None, None))
"""The fields that are the same in all lines. `logger.info` makes them for each line, and searches the stack for
its caller: a fifth of the time of a put (`scripts/bench http`, row «requests»)."""

CONNECTION_LOST: Final = "the connection to the database was lost: carried out or not"
CLIENT_GONE: Final = "its client hung up: carried out or not"
DATABASE_FAILED: Final = "the database failed: carried out or not"
"""Outcomes of writes of which it is not known whether they were made."""


def wrote(
    token: AccessToken,
    action: str,
    store: str | None,
    keys: Iterable[str],
    version: int | None = None,
    outcome: str | None = None,
) -> None:
    """A line for a write: its token, what was done, to which keys, and its versionstamp or outcome if it has one."""
    if logger.isEnabledFor(logging.INFO):
        _line(token, action, store, " ".join(keys), version, outcome)


def read(token: AccessToken, action: str, store: str | None, keys: Iterable[str]) -> None:
    """A line for values that were read with an admin token."""
    if token.is_admin and logger.isEnabledFor(logging.INFO):
        _line(token, action, store, " ".join(keys), None)


def _line(
    token: AccessToken, action: str, store: str | None, keys: str, version: int | None, outcome: str | None = None
) -> None:
    text = f"token {token.name}: {action} {keys}"
    if store is not None:
        text += f" in store {store}"
    if version is not None:
        text += f", versionstamp {version}"
    if outcome is not None:
        text += f", {outcome}"
    fields = {**_FIELDS, "msg": text, "created": time(), "token": token.name, "action": action, "key": keys}
    if store is not None:
        fields["store"] = store
    if version is not None:
        fields["versionstamp"] = version
    if outcome is not None:
        fields["outcome"] = outcome
    record = logging.LogRecord.__new__(logging.LogRecord)
    vars(record).update(fields)
    logger.handle(record)
