"""What is built on the semantic store, for threads and scripts: checkpoints, flags and others.

Written by `scripts/reference` from the asynchronous classes: change those.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from keyloft.core.driving import Driven, SyncList, iterate
from keyloft.semantic.checkpoints import Checkpoint
from keyloft.semantic.dead_letters import DeadLetter, DeadLetters
from keyloft.semantic.envelope import Envelope
from keyloft.semantic.flags import Flags
from keyloft.semantic.index_versions import IndexVersion
from keyloft.semantic.intents import Intent
from keyloft.semantic.rules import ANY, ExpectedVersion
from keyloft.semantic.sync.helpers import SyncLiveFlags


class SyncCheckpoint(Driven[Checkpoint]):
    """The position that a workflow has reached.

    Example:
        checkpoint = store.checkpoint(key, writer="harvester:sync")
        done = checkpoint.resume(0)
        ...                                     # the work after `done`
        checkpoint.advance(done + 1)      # VersionConflict: another worker was faster
    """

    def resume(self, default: Any = None) -> Any:
        """The position that any worker has reached; the default where there is none yet."""
        return self._run(self._inner.resume(default))

    def advance(
        self, position: Any, *, request_id: str | None = None, spec_ref: str | None = None, fence: int | None = None
    ) -> Envelope:
        """Move on from the position that `resume`, or the last `advance`, returned.

        Raises:
            VersionConflict: Another worker has moved the checkpoint meanwhile: resume, then do what is left.
            NotForward: The checkpoint has reached this position already, or a later one.
        """
        return self._run(self._inner.advance(position, request_id=request_id, spec_ref=spec_ref, fence=fence))

    def step(self, position: Any, *, spec_ref: str | None = None, fence: int | None = None) -> Intent:
        """What `advance` would put, for a batch: a result and the step past it are committed together or not at all.

        Example:
            store.batch([Intent.put(…), checkpoint.step(done + 1, fence=lock.fence)])
        """
        return self._run(self._inner.step(position, spec_ref=spec_ref, fence=fence))


class SyncIndexVersion(Driven[IndexVersion]):
    """The active version of an index.

    Example:
        index = store.index_version("tenant/acme/project/web/search/index/docs/version", writer="indexer:rebuild")
        index.publish("2026-11-16")
        for version in index.watch():     # the one now, then each next one
            ...
    """

    def current(self) -> Any:
        """The active version, or None."""
        return self._run(self._inner.current())

    def publish(
        self,
        version: Any,
        *,
        expected_version: ExpectedVersion = ANY,
        producer: str | None = None,
        consumer_hints: tuple[str, ...] = (),
        request_id: str | None = None,
        spec_ref: str | None = None,
    ) -> Envelope:
        """Make a version the active one; every watch reports it."""
        return self._run(
            self._inner.publish(
                version,
                expected_version=expected_version,
                producer=producer,
                consumer_hints=consumer_hints,
                request_id=request_id,
                spec_ref=spec_ref,
            )
        )

    def watch(self) -> Iterator[Any]:
        """The active version now, then after each change; None while there is none."""
        return iterate(self._inner.watch(), self._driver)


class SyncFlags(Driven[Flags]):
    """The flags of a project, at `flags/<name>`.

    Example:
        flags = store.flags("acme", "web", defaults={"new-ui": False})
        flags.set("new-ui", True, writer="console:rollout")
        if flags.get("new-ui"):
            ...
        with flags.live() as now:
            now["new-ui"]                  # without waiting
    """

    def get(self, name: str) -> Any:
        """The value of a flag; its default where it is not set.

        Raises:
            InvalidArgument: The flag is not set, and has no default.
        """
        return self._run(self._inner.get(name))

    def all(self) -> dict[str, Any]:
        """All flags that are set or have a default."""
        return self._run(self._inner.all())

    def set(
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
        return self._run(
            self._inner.set(
                name,
                value,
                writer=writer,
                expected_version=expected_version,
                producer=producer,
                consumer_hints=consumer_hints,
                ttl_seconds=ttl_seconds,
                request_id=request_id,
                spec_ref=spec_ref,
            )
        )

    def unset(self, name: str, *, writer: str) -> bool:
        """Let a flag fall back to its default; returns whether it was set."""
        return self._run(self._inner.unset(name, writer=writer))

    def watch(self) -> Iterator[dict[str, Any]]:
        """All flags now, then all of them again after each change."""
        return iterate(self._inner.watch(), self._driver)

    def live(self) -> "SyncLiveFlags":
        """The flags as a mapping that keeps itself up to date: `with flags.live() as now:`."""
        return SyncLiveFlags(self._inner.live(), self._driver)


class SyncDeadLetters(Driven[DeadLetters]):
    """Writes that were given up: list them, retry them, or drop them."""

    def retry(
        self, letter: DeadLetter, *, expected_version: ExpectedVersion | None = None
    ) -> Sequence[Envelope | None]:
        """Carry out the request of a dead letter once more; the commit that does so removes the dead letter.

        Args:
            letter: As `list` returned it.
            expected_version: Replaces what the writes expected when they were given up; "*" for any version or none.

        Raises:
            VersionConflict: The request still conflicts with what is stored; the dead letter stays.
            InvalidArgument: Another caller has retried or dropped it meanwhile.
        """
        return self._run(self._inner.retry(letter, expected_version=expected_version))

    def drop(self, letter: DeadLetter) -> bool:
        """Remove a dead letter; returns whether it was still stored."""
        return self._run(self._inner.drop(letter))

    @property
    def unsaved(self) -> int:
        """How many dead letters wait for the store."""
        return self._inner.unsaved

    def list(self, project: str, *, limit: int | None = None, after: str | None = None) -> "SyncList[DeadLetter]":
        """The dead letters of `tenant/<tenant>/project/<project>`, the oldest first: iterate it, or call `all`.

        Args:
            project: The project that they belong to.
            limit: How many to return at most.
            after: Only those after the one with this id.
        """
        return SyncList(self._inner.list(project, limit=limit, after=after), self._driver)
