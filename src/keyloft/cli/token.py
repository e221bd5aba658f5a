"""The command `token new`: makes a token for the HTTP API."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from keyloft.cli.options import Commands, Output, argument, number_option, option
from keyloft.cli.terminal import say, to_json
from keyloft.errors import InvalidArgument


def new(
    name: Annotated[str, argument("NAME", "Who it is for; the audit log shows it.")],
    *,
    scope: Annotated[
        list[str] | None,
        option(
            "SCOPE",
            "What it may do: admin, or an access and an area, as in read:kv/users. The access is status, read or "
            "write; status is for the admin page without values. The area is kv, kv/PREFIX, db/NAME, "
            "db/NAME/PREFIX, plugin/NAME or tenant/NAME. Can be given several times.",
        ),
    ] = None,
    days: Annotated[int | None, number_option("N", "How many days it is valid; without it, until removed.")] = None,
    out: Output,
) -> None:
    """Make a token for the HTTP API. It is printed once, with the lines for the file of --http-tokens.

    The lines hold the token's SHA-256, not the token. A running service reads the file again by itself.

    Example: keyloft token new ci --scope read:kv/users --scope write:plugin/trivia
    """
    from keyloft.http.tokens import ADMIN, TokenScope, declaration, new_token

    if not scope:
        raise InvalidArgument("scope: expected at least one, as in --scope read:kv/users")
    for text in scope:
        if text != ADMIN:
            TokenScope.read(text)
    if days is not None and not 1 <= days <= 36_500:
        raise InvalidArgument("days: expected a whole number from 1 to 36,500")
    expires = None if days is None else (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)
    token = new_token()
    lines = declaration(name, token, scope, expires)
    if out.is_for_people:
        say(f"The token, which is not stored anywhere:\n\n  {token}\n\nFor the file of --http-tokens:\n\n{lines}")
    else:
        say(to_json({"token": token, "declaration": lines}))


COMMANDS: Final[Commands] = (new,)
