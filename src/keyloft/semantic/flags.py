"""Feature flags of a project: with defaults, and live where they are needed at every step."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from keyloft.errors import Closed, InvalidArgument, KeyloftError
from keyloft.semantic import keys
from keyloft.semantic.envelope import ANY, Envelope, ExpectedVersion, Semantics

if TYPE_CHECKING:
    from keyloft.semantic.store import SemanticStore

logger = logging.getLogger("keyloft.semantic")

_FOLDER: Final = "flags"
_PAUSE_SECONDS: Final = 1.0


class Flags:
    """The flags of a project, at `flags/<name>`.

    Example:
        flags = store.flags("acme", "web", defaults={"new-ui": False})
        await flags.set("new-ui", True, writer="console:rollout")
        if await flags.get("new-ui"):
            ...
        async with flags.live() as now:
            now["new-ui"]                  # no waiting, and never older than the last change that was heard of
    """

    def __init__(self, store: "SemanticStore", tenant: str, project: str, defaults: Mapping[str, Any]) -> None:
        self._store = store
        self._tenant = tenant
        self._project = project
        self.defaults = dict(defaults)
        for name in self.defaults:
            self._key(name)

    async def get(self, name: str) -> Any:
        """The value of a flag; its default where it is not set.

        Raises:
            InvalidArgument: It is not set, and has no default.
        """
        entry = await self._store.get(self._key(name))
        if entry is not None:
            return entry.value
        if name not in self.defaults:
            raise InvalidArgument(f"the flag {name} is not set and has no default: flags(…, defaults={{…}})")
        return self.defaults[name]

    async def all(self) -> dict[str, Any]:
        """All flags that are set or have a default."""
        entries = self._store.list(self._prefix, values=True)
        return self.defaults | {entry.key.removeprefix(self._prefix): entry.value async for entry in entries}

    async def set(
        self,
        name: str,
        value: Any,
        *,
        writer: str,
        expected_version: ExpectedVersion = ANY,
        producer: str | None = None,
        consumer_hints: tuple[str, ...] = (),
        ttl_seconds: int | None = None,
        request_id: str | None = None,
        spec_ref: str | None = None,
    ) -> Envelope:
        """Set a flag, for everybody; with a TTL it falls back to its default after so many seconds."""
        return await self._store.put(
            self._key(name),
            value,
            expected_version=expected_version,
            writer=writer,
            semantics=Semantics("feature_flag", producer, consumer_hints, ttl_seconds),
            request_id=request_id,
            spec_ref=spec_ref,
        )

    async def unset(self, name: str, *, writer: str) -> bool:
        """Let a flag fall back to its default; returns whether it was set."""
        return await self._store.delete(self._key(name), expected_version=ANY, writer=writer) is not None

    async def watch(self) -> AsyncIterator[dict[str, Any]]:
        """All flags now, then all of them again whenever one changed."""
        # Before they are read, so that no change falls between the two.
        async with self._store.changes(self._prefix) as changes:
            values = await self.all()
            yield dict(values)
            async for changed in changes:
                for key, entry in changed.items():
                    name = key.removeprefix(self._prefix)
                    if entry is not None:
                        values[name] = entry.value
                    elif name in self.defaults:
                        values[name] = self.defaults[name]
                    else:
                        values.pop(name, None)
                yield dict(values)

    def live(self) -> "LiveFlags":
        """The flags as a mapping that keeps itself up to date, while it is entered."""
        return LiveFlags(self)

    @property
    def _prefix(self) -> str:
        return f"tenant/{self._tenant}/project/{self._project}/{_FOLDER}/"

    def _key(self, name: str) -> str:
        if not isinstance(name, str) or "/" in name:
            raise InvalidArgument("a flag's name is one part of a path: a-z 0-9 . _ -")
        return keys.key_of(self._tenant, self._project, _FOLDER, name)


class LiveFlags(Mapping[str, Any]):
    """Flags that keep themselves up to date, to be read without waiting."""

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._values: dict[str, Any] = {}
        self._following: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._has_begun = False

    async def __aenter__(self) -> "LiveFlags":
        self._following = asyncio.create_task(self._follow(), name="keyloft live flags")
        changing = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([changing, self._following], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._following.cancel()  # it is not entered, so nobody will leave it
            raise
        finally:
            changing.cancel()
        if self._following.done():
            await self._following
            raise Closed
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._following is not None
        self._following.cancel()
        await asyncio.wait([self._following])

    async def changed(self) -> None:
        """Wait for the next change.

        Raises:
            Closed: There will be none: the store is closed.
        """
        self._changed.clear()
        following = self._entered()
        changing = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([changing, following], return_when=asyncio.FIRST_COMPLETED)
            if following.done() and not changing.done():
                raise Closed
        finally:
            changing.cancel()

    def __getitem__(self, name: str) -> Any:
        self._entered()
        return self._values[name]

    def _entered(self) -> asyncio.Task[None]:
        if self._following is None:
            raise InvalidArgument("these flags are live once they are entered: `async with flags.live() as now:`")
        return self._following

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    async def _follow(self) -> None:
        while True:
            try:
                async for values in self._flags.watch():
                    self._values, self._has_begun = values, True
                    self._changed.set()
                return  # the store is closed
            except Closed:
                return
            except KeyloftError as error:
                if not self._has_begun:
                    raise
                logger.warning("[KV] live flags can't be kept up to date, trying again: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
