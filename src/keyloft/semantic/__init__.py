"""State that says what it means: compare-and-set with a purpose, locks that hold, checkpoints, flags, an audit trail.

    store = SemanticStore(kv)                     # on an open store
    entry = await store.put(key, value, expected_version=0, writer="agent:directive", semantics=Semantics("cursor"))
    async with store.lock(key, writer="agent:directive") as lock: ...
    service = SemanticService(nats, store)        # serves it on db.semantic.<tenant>.<project>.<operation>
    client = await SemanticClient.connect("nats://…", tenant="acme", project="web")

`Envelope` is what is read; `VersionConflict` tells what is there instead of what was expected.
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
from keyloft.semantic.keys import key_of, shortened
from keyloft.semantic.locks import Lock
from keyloft.semantic.monitoring import Alert, Signals
from keyloft.semantic.planning import Delete, FailedWrite, Put
from keyloft.semantic.retry import Retry
from keyloft.semantic.store import SemanticStore

if TYPE_CHECKING:
    from keyloft.nats.connection import Login
    from keyloft.semantic.client import SemanticClient
    from keyloft.semantic.service import SemanticService

__all__ = [
    "Alert",
    "AuditRecord",
    "Checkpoint",
    "DeadLetter",
    "Delete",
    "Envelope",
    "Escalated",
    "FailedWrite",
    "Flags",
    "IndexVersion",
    "Lock",
    "LockHeld",
    "LockLost",
    "Login",
    "NotForward",
    "NothingToRestore",
    "Put",
    "Retry",
    "SemanticClient",
    "SemanticService",
    "SemanticStore",
    "Semantics",
    "Signals",
    "StaleFence",
    "VersionConflict",
    "key_of",
    "shortened",
]

__getattr__ = loader(
    __name__,
    {
        "Login": ("keyloft.nats.connection", "nats"),
        "SemanticClient": ("keyloft.semantic.client", "nats"),
        "SemanticService": ("keyloft.semantic.service", "nats"),
    },
)
