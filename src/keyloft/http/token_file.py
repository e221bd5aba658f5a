"""The tokens that are valid now: from the settings, and from a file that is read again when it changes."""

import logging
import tomllib
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from keyloft import limits
from keyloft.errors import InvalidArgument
from keyloft.http.tokens import AccessToken, matching, read_declared

logger = logging.getLogger(__name__)


def read_token_file(path: str) -> tuple[AccessToken, ...]:
    """The tokens of a file.

    Raises:
        InvalidArgument: It can't be read, or declares something else.
    """
    try:
        declared = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"{path}: the tokens can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: the tokens are not TOML: {error}") from None
    try:
        return read_declared(declared)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None


class ValidTokens:
    """The valid tokens. When a token is looked up, the file is read again if it has changed; once a second at most."""

    def __init__(
        self, fixed: tuple[AccessToken, ...] = (), file: str | None = None, now: Callable[[], float] = monotonic
    ) -> None:
        """Read the file.

        Args:
            fixed: Tokens that the settings have.
            file: The file with further ones.
            now: The time, for tests.

        Raises:
            InvalidArgument: The file can't be read.
        """
        self._fixed = fixed
        self._file = file
        self._now = now
        self._tokens = fixed
        self._state: object = None
        self._checked_at = now()
        if file is not None:
            self._state = _state_of(file)
            self._tokens = (*fixed, *read_token_file(file))

    @property
    def are_configured(self) -> bool:
        """Whether tokens or a file of tokens are set, without which there is no API. A file may be empty at first."""
        return bool(self._fixed) or self._file is not None

    def find(self, given: str) -> AccessToken | None:
        """The valid token that was given, or None."""
        self._refresh()
        return matching(self._tokens, given)

    def is_valid(self, token: AccessToken) -> bool:
        """Whether a token that was found earlier is still valid, with the same scopes."""
        self._refresh()
        for each in self._tokens:
            if each is token or (
                each.digest == token.digest and (each.is_admin, each.scopes) == (token.is_admin, token.scopes)
            ):
                return not each.has_expired()
        return False

    def reload(self) -> None:
        """Read the file again. If it can't be read, the tokens stay as they are, and the log says why."""
        if self._file is None:
            return
        self._state = _state_of(self._file)
        try:
            self._tokens = (*self._fixed, *read_token_file(self._file))
        except InvalidArgument as error:
            logger.error("the tokens stay as they were: %s", error)
        else:
            logger.info("read %s again: %d tokens", self._file, len(self._tokens) - len(self._fixed))

    def _refresh(self) -> None:
        if self._file is None or self._now() - self._checked_at < limits.HTTP_TOKENS_SECONDS:
            return
        self._checked_at = self._now()
        if _state_of(self._file) != self._state:
            self.reload()


def _state_of(file: str) -> object:
    try:
        found = Path(file).stat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
