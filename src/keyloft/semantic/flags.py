"""Feature flags of a project: with defaults, and as a live mapping that can be read without waiting."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from keyloft import limits
from keyloft.core.closing import AsyncClosing
from keyloft.errors import Closed, HistoryGone, InvalidArgument, KeyloftError
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.keys import check_part
from keyloft.semantic.monitoring import logger
from keyloft.semantic.rules import ANY, ExpectedVersion, wrong

if TYPE_CHECKING:
    from keyloft.semantic.workflows import Workflows


class Flags:
    """The flags of a project, at `flags/<name>`.

    Example:
        flags = store.flags("acme", "web", defaults={"new-ui": False})
        await flags.set("new-ui", True, writer="console:rollout")
        if await flags.get("new-ui"):
            ...
        async with flags.live() as now:
            now["new-ui"]                  # without waiting
    """

    def __init__(self, store: "Workflows", prefix: str, defaults: Mapping[str, Any]) -> None:
        # `prefix` is the beginning of the keys of all flags, as the store takes them.
        self._store = store
        self._prefix = prefix
        if not isinstance(defaults, Mapping):
            raise wrong("defaults", 'a dict of names and values, as in {"new-ui": False}', defaults)
        self.defaults = dict(defaults)
        for name in self.defaults:
            self._key(name, "defaults")

    def __repr__(self) -> str:
        project = self._prefix.removesuffix("flags/").removesuffix("/")
        return f"<Flags{f' of {project}' if project else ''} in {self._store!r}>"

    async def get(self, name: str) -> Any:
        """The value of a flag; its default where it is not set.

        Raises:
            InvalidArgument: The flag is not set, and has no default.
        """
        entry = await self._store.get(self._key(name))
        if entry is not None:
            return entry.value
        if name not in self.defaults:
            raise InvalidArgument(
                f"name: the flag {name} is not set and has no default; flags(…, defaults={{…}}) gives it one"
            )
        return self.defaults[name]

    async def all(self) -> dict[str, Any]:
        """All flags that are set or have a default."""
        return self.defaults | await self._stored()

    async def _stored(self) -> dict[str, Any]:
        entries = self._store.list(self._prefix, values=True)
        return {_name(entry.key): entry.value async for entry in entries}

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
        """Set a flag; with a TTL it falls back to its default after this many seconds."""
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
        """All flags now, then all of them again after each change."""
        while True:
            # The watch begins before the read, so that no change falls between the two.
            async with self._store.changes(self._prefix) as changes:
                stored = await self._stored()
                yield self.defaults | stored
                try:
                    async for changed in changes:
                        for key, entry in changed.items():
                            stored.pop(_name(key), None)
                            if entry is not None:
                                stored[_name(key)] = entry.value
                        yield self.defaults | stored
                    return
                except HistoryGone:
                    continue  # the change log no longer has all changes: read all flags again

    def live(self) -> "LiveFlags":
        """The flags as a mapping that keeps itself up to date: `async with flags.live() as now:`."""
        return LiveFlags(self)

    def _key(self, name: str, argument: str = "name") -> str:
        return self._store.check_key(self._prefix + check_part(name, argument), argument)


def _name(key: str) -> str:
    """The name of a flag, by the whole key of its entry."""
    return key.split("/", 5)[5]


class LiveFlags(AsyncClosing, Mapping[str, Any]):
    """A mapping of flags that keeps itself up to date and is read without waiting."""

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._values: dict[str, Any] = {}
        self._following: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._changes = 0
        self._has_begun = False

    def __repr__(self) -> str:
        following = self._following
        state = "not entered" if following is None else "ended" if following.done() else "up to date"
        return f"<LiveFlags of {self._flags!r}, {state}>"

    async def __aenter__(self) -> "LiveFlags":
        self._following = asyncio.create_task(self._follow(), name="keyloft live flags")
        try:
            await self.changed()
        except asyncio.CancelledError:
            self._following.cancel()  # `__aexit__` does not run
            raise
        return self

    async def aclose(self) -> None:
        """End the updates."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])

    async def changed(self) -> None:
        """Wait for the next change.

        Raises:
            Closed: The store is closed, so there will be none.
        """
        following = self._entered()
        self._changed.clear()
        changing = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([changing, following], return_when=asyncio.FIRST_COMPLETED)
            if not changing.done():
                await following  # raises the error that ended it, if there was one
                raise Closed
        finally:
            changing.cancel()

    async def changed_after(self, seen: int) -> int:
        """Wait until there were more than `seen` changes; returns how many. For threads, which may miss some."""
        if self._changes == seen:
            await self.changed()
        return self._changes

    def __getitem__(self, name: str) -> Any:
        self._entered()
        return self._values[name]

    def _entered(self) -> asyncio.Task[None]:
        if self._following is None:
            raise InvalidArgument(
                "flags.live() must be entered first: `async with flags.live() as now:`, or `with` without a loop"
            )
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
                    self._changes += 1
                return  # the store is closed
            except Closed:
                return
            except KeyloftError as error:
                if not self._has_begun:
                    raise
                logger.warning("[KV] live flags can't be kept up to date, trying again: %s", error)
                await asyncio.sleep(limits.LIVE_FLAGS_PAUSE_SECONDS)
