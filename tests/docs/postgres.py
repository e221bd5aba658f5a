"""The PostgreSQL that a document speaks of: roles and databases with names of their own, on the tests' server.

A document says `postgresql://user:password@127.0.0.1:5432/database`, and means the tests' server. Roles and databases
that it makes get an ending, so that nothing on that server is touched, and are dropped in the end. A document that uses
a database without making one finds it made.
"""

import re
import subprocess
import urllib.parse
from pathlib import Path
from uuid import uuid4

from tests.docs.blocks import Block
from tools.postgres import find_programs, query

_URL = re.compile(r"(postgresql(?:\+\w+)?://)(\w+):(\w+)@127\.0\.0\.1:5432/(\w+)(\?[^\s\"']*)?")
_MADE = re.compile(r"CREATE (ROLE|DATABASE) (\w+)")
_PATIENCE_SECONDS = 30.0


class DocumentPostgres:
    """What one document makes of a server."""

    @staticmethod
    def is_meant_by(blocks: list[Block]) -> bool:
        return any(block.purpose == "postgres" or _URL.search(block.text) for block in blocks)

    def __init__(self, server: str, blocks: list[Block]) -> None:
        self._server = urllib.parse.urlsplit(server)
        self._ending = uuid4().hex[:8]
        self._database: str | None = None
        self.programs = _programs_for(server)
        text = "\n".join(block.text for block in blocks)
        made = set(_MADE.findall(text))
        missing = "" if any(kind == "DATABASE" for kind, _ in made) else self._missing(text)
        self._made = made | set(_MADE.findall(missing))
        self.run(self.translate(missing))

    def translate(self, text: str) -> str:
        """A block, with the names and the address that it has here."""
        for _, name in self._made:
            text = re.sub(rf"\b{name}\b", f"{name}_{self._ending}", text)
        return _URL.sub(self._address, text)

    def run(self, script: str) -> str:
        """Run SQL as an administrator, and see where it leads; returns what it printed."""
        database = self._database or self._server.path.lstrip("/")
        done = subprocess.run(
            [self.programs / "psql", "-X", "-v", "ON_ERROR_STOP=1", self._url(self._server.netloc, database)],
            input=script,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        for kind, name in _MADE.findall(script):
            self._database = name if kind == "DATABASE" else self._database
        return done.stdout

    def end(self) -> None:
        """Drop it all; databases first, which belong to roles."""
        self._database = None
        for kind, name in sorted(self._made):
            self.run(f"DROP {kind} IF EXISTS {name}_{self._ending}{' WITH (FORCE)' if kind == 'DATABASE' else ''};")

    def _address(self, found: re.Match[str]) -> str:
        scheme, user, password, database, options = found.groups()
        host = self._server.netloc.rpartition("@")[2]
        url = self._url(f"{user}:{password}@{host}", database)
        url = url.replace("postgresql://", scheme, 1)
        return url + (options or "").replace("?", "&" if self._server.query else "?", 1)

    def _url(self, netloc: str, database: str) -> str:
        query = f"?{self._server.query}" if self._server.query else ""
        return f"postgresql://{netloc}/{database}{query}"

    @staticmethod
    def _missing(text: str) -> str:
        used = {(user, password, database) for _, user, password, database, _ in _URL.findall(text)}
        return "".join(
            f"CREATE ROLE {user} LOGIN PASSWORD '{password}';\nCREATE DATABASE {database} OWNER {user};\n"
            for user, password, database in used
        )


def _programs_for(server: str) -> Path:
    """psql and its like, as old as the server if there are such: newer ones say what it does not understand."""
    newest = find_programs()
    [[version]] = query(server, "SHOW server_version_num")
    for programs in newest.parents[1].glob("pginstall*/bin"):
        shown = subprocess.run([programs / "psql", "--version"], capture_output=True, text=True, check=True).stdout
        if f" {int(version) // 10_000}." in shown:
            return programs
    return newest
