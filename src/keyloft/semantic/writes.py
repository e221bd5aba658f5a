"""The writes that the semantic store and its client over NATS have in common: put, delete, restore and batch."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from keyloft.errors import DatabaseError, InvalidArgument, InvalidInput, KeyloftError, Unanswered
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.intents import Intent, WriteRequest, check_batch
from keyloft.semantic.rules import ExpectedVersion, wrong

Written: TypeAlias = list[Envelope | None]
"""What `put` and `delete` return, for each intent."""


FAILURES: Final = (DatabaseError, Unanswered)
"""The database fails, or the service can't be reached: trying again may help."""


class Writes:
    """Makes write requests of calls. Subclasses carry them out."""

    async def write(self, request: WriteRequest) -> Written:
        """Carry out a write request, as `put`, `delete`, `restore` and `batch` make them.

        Raises:
            InvalidArgument: The request has no intents, or one that can't be carried out, whatever is stored.
        """
        if not request.intents:
            raise InvalidArgument("request: expected at least one intent, got none")
        for intent in request.intents:
            self.check_intent(intent)
        try:
            return await self._carry_out(request)
        except KeyloftError as error:
            error.failed_request = request
            raise

    async def _carry_out(self, request: WriteRequest) -> Written:
        raise NotImplementedError

    def check_intent(self, intent: Intent) -> None:
        """Refuse an intent that can't be carried out, whatever is stored."""
        raise NotImplementedError

    async def put(
        self,
        key: str,
        value: Any,
        *,
        expected_version: ExpectedVersion,
        writer: str,
        semantics: Semantics,
        request_id: str | None = None,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Envelope:
        """Store a value, if the stored entry is the expected one.

        Args:
            key: `tenant/<tenant>/project/<project>/<path>`; for a `SemanticClient`, the path alone.
            value: Any value that JSON can hold, up to 64 KiB of it.
            expected_version: 0: the key must have no entry. n: its entry must be version n. "*": either.
            writer: Who writes: `<agent>:<directive>`, or the name of a service account.
            semantics: What the entry means; with a TTL it expires after this many seconds.
            request_id: Makes a retry harmless: the same request again gets the first outcome, and writes nothing.
            spec_ref: A pointer to the spec that governs this entry.
            fence: The token of a lock in the same project: the put is committed only while that lock is held.

        Raises:
            VersionConflict: Another entry is stored; or the request id was used for another request.
            StaleFence: The lock is no longer held under this token.
            InvalidInput: An argument breaks a rule, which the message names.
            TimedOut: Over NATS: the put may be committed or not. Repeat the call with the same request id to find out.
        """
        intent = Intent.put(
            key,
            value,
            expected_version=expected_version,
            writer=writer,
            semantics=semantics,
            spec_ref=spec_ref,
            fence=fence,
        )
        [entry] = await self.write(WriteRequest(intents=(intent,), request_id=request_id))
        assert entry is not None
        return entry

    async def delete(
        self,
        key: str,
        *,
        expected_version: ExpectedVersion,
        writer: str,
        request_id: str | None = None,
        spec_ref: str | None = None,
        fence: int | None = None,
    ) -> Envelope | None:
        """Remove an entry, if it is the expected one, and return it. It can be restored for some days.

        Raises:
            VersionConflict: Another entry is stored; or the request id was used for another request.
            StaleFence: The lock is no longer held under this token.
        """
        intent = Intent.delete(key, expected_version=expected_version, writer=writer, spec_ref=spec_ref, fence=fence)
        [removed] = await self.write(WriteRequest(intents=(intent,), request_id=request_id))
        return removed

    async def restore(
        self, key: str, *, writer: str, request_id: str | None = None, spec_ref: str | None = None
    ) -> Envelope:
        """Restore the entry that was deleted last, or has expired, at a key that has no entry now. Its TTL restarts.

        Raises:
            NothingToRestore: Nothing was deleted or has expired there, or too long ago.
            VersionConflict: The key has an entry.
        """
        intent = Intent.restore(key, writer=writer, spec_ref=spec_ref)
        [entry] = await self.write(WriteRequest(intents=(intent,), request_id=request_id))
        assert entry is not None
        return entry

    async def batch(self, operations: Iterable[Intent], *, request_id: str | None = None) -> Written:
        """Make several puts and deletes, all or none; returns what `put` and `delete` would, in the same order.

        Example:
            await store.batch([
                Intent.put(key, value, expected_version=0, writer="indexer:swap", semantics=Semantics("config")),
                Intent.delete(other, expected_version=version, writer="indexer:swap"),
            ])

        Raises:
            VersionConflict: Its `conflicts` names every operation that met one.
        """
        if isinstance(operations, Intent) or not isinstance(operations, Iterable):
            raise wrong("operations", "several, as in batch([Intent.put(…), Intent.delete(…)])", operations)
        intents = (*operations,)
        self.check_operations(intents)
        return await self.write(WriteRequest(intents=intents, request_id=request_id, is_batch=True))

    def check_operations(self, intents: Sequence[Intent]) -> None:
        """Refuse a batch that can't be carried out, whatever is stored.

        Raises:
            InvalidInput: The batch has too few or too many operations, a wrong one, or two for the same key.
        """
        check_batch(intents)
        for number, intent in enumerate(intents):
            if not isinstance(intent, Intent):
                raise wrong(f"operations[{number}]", "what Intent.put or Intent.delete returns", intent)
            try:
                self.check_intent(intent)
            except InvalidInput as error:
                raise type(error)(f"operations[{number}]: {error}") from None
        named = [intent.key for intent in intents]
        if len(set(named)) < len(named):
            twice = next(key for key in named if named.count(key) > 1)
            raise InvalidArgument(f"operations: expected each key once, got {twice} twice")
