"""Sessions of the admin page: who is logged in, for how long, and the token that each of their forms carries."""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic

from keyloft import limits
from keyloft.http.token_file import ValidTokens
from keyloft.http.tokens import AccessToken


class PageSession:
    """One log-in."""

    __slots__ = ("began", "form_token", "notice", "seen", "token")

    def __init__(self, token: AccessToken, now: float) -> None:
        self.token = token
        self.form_token = secrets.token_urlsafe(32)
        """A secret that each form of this session carries, and that a page of another site can't know."""
        self.notice = ""
        """A message about what was done, which the next page shows once."""
        self.began = self.seen = now

    def take_notice(self) -> str:
        notice, self.notice = self.notice, ""
        return notice

    def is_form_token(self, given: str) -> bool:
        return hmac.compare_digest(self.form_token.encode(), given.encode("utf-8", "replace"))


class SessionTable:
    """A bounded number of sessions, in the order of their last requests. They end with the service."""

    def __init__(self, tokens: ValidTokens, now: Callable[[], float] = monotonic) -> None:
        self._tokens = tokens
        self._now = now
        self._sessions: OrderedDict[bytes, PageSession] = OrderedDict()
        self._codes: OrderedDict[bytes, tuple[AccessToken, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, token: AccessToken) -> tuple[str, PageSession]:
        """A new session, and the id that its cookie carries."""
        name = secrets.token_urlsafe(32)
        session = self._sessions[_digest(name)] = PageSession(token, self._now())
        while len(self._sessions) > limits.PAGE_SESSIONS:
            self._sessions.popitem(last=False)
        return name, session

    def new_code(self, token: AccessToken) -> str:
        """A code that begins a session once, within a minute: unlike a token, it may be part of a command line."""
        code = secrets.token_urlsafe(32)
        self._codes[_digest(code)] = (token, self._now())
        while len(self._codes) > limits.PAGE_CODES:
            self._codes.popitem(last=False)
        return code

    def take_code(self, code: str) -> AccessToken | None:
        """The token that a code stands for, if it is valid; the code is used up."""
        token, made = self._codes.pop(_digest(code), (None, 0.0))
        is_valid = token is not None and self._now() - made <= limits.PAGE_CODE_SECONDS and self._tokens.is_valid(token)
        return token if is_valid else None

    def find(self, name: str) -> PageSession | None:
        """The session of a cookie; None if it has ended, or its token is no longer valid."""
        digest, now = _digest(name), self._now()
        session = self._sessions.get(digest)
        if session is None:
            return None
        is_over = now - session.began > limits.PAGE_SESSION_SECONDS or now - session.seen > limits.PAGE_IDLE_SECONDS
        if is_over or not self._tokens.is_valid(session.token):
            del self._sessions[digest]
            return None
        session.seen = now
        self._sessions.move_to_end(digest)
        return session

    def end(self, name: str) -> None:
        """Log out."""
        self._sessions.pop(_digest(name), None)


def _digest(name: str) -> bytes:
    """The hash by which a session is found, so that the time of a search tells nothing about its id."""
    return hashlib.sha256(name.encode("utf-8", "replace")).digest()
