"""State of workflows: compare-and-set on entries that say what they mean, locks, checkpoints, flags, an audit trail.

    store = SemanticStore(kv)                     # on an open store
    entry = await store.put(key, value, expected_version=0, writer="agent:directive", semantics=Semantics("cursor"))
    async with store.lock(key, writer="agent:directive") as lock: ...
    async with SemanticService(nats, store): ...  # serves it on db.semantic.<tenant>.<project>.<operation>
    SyncSemanticStore(kv)                         # the same without await, on what keyloft.open_sync returns
    client = await SemanticClient.connect("nats://…", tenant="acme", project="web")

Reads return an `Envelope`. A write that does not find the entry that it expects raises `VersionConflict`, which has the
stored entry.
"""

from typing import TYPE_CHECKING

from keyloft.core.extras import loader
from keyloft.errors import Escalated, LockHeld, LockLost, NotForward, NothingToRestore, StaleFence, VersionConflict
from keyloft.semantic.audit import AuditRecord
from keyloft.semantic.checkpoints import Checkpoint
from keyloft.semantic.dead_letters import DeadLetter
from keyloft.semantic.envelope import Envelope, Semantics
from keyloft.semantic.flags import Flags
from keyloft.semantic.index_versions import IndexVersion
from keyloft.semantic.intents import FailedWrite, Intent, WriteRequest
from keyloft.semantic.keys import key_of, shortened
from keyloft.semantic.locks import Lock
from keyloft.semantic.monitoring import Alert, Signals
from keyloft.semantic.request_ids import request_id_of
from keyloft.semantic.retry import Retry
from keyloft.semantic.store import SemanticStore

if TYPE_CHECKING:
    from keyloft.nats.connection import Login
    from keyloft.nats.events import Event
    from keyloft.semantic.client import SemanticClient
    from keyloft.semantic.service import SemanticService
    from keyloft.semantic.sync.helpers import SyncLock
    from keyloft.semantic.sync.store import SyncSemanticStore

__all__ = [
    "Alert",
    "AuditRecord",
    "Checkpoint",
    "DeadLetter",
    "Envelope",
    "Escalated",
    "Event",
    "FailedWrite",
    "Flags",
    "IndexVersion",
    "Intent",
    "Lock",
    "LockHeld",
    "LockLost",
    "Login",
    "NotForward",
    "NothingToRestore",
    "Retry",
    "SemanticClient",
    "SemanticService",
    "SemanticStore",
    "Semantics",
    "Signals",
    "StaleFence",
    "SyncLock",
    "SyncSemanticStore",
    "VersionConflict",
    "WriteRequest",
    "key_of",
    "request_id_of",
    "shortened",
]

if not TYPE_CHECKING:  # with a `__getattr__`, a type checker would accept any name
    __getattr__ = loader(
        __name__,
        Event="keyloft.nats.events",
        Login="keyloft.nats.connection",
        SemanticClient="keyloft.semantic.client",
        SemanticService="keyloft.semantic.service",
        SyncLock="keyloft.semantic.sync.helpers",
        SyncSemanticStore="keyloft.semantic.sync.store",
    )
