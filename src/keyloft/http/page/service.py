"""The parts of the service that the admin page shows: counters, usage, settings, connection to NATS."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from keyloft.nats.meters import ServiceMeters
from keyloft.plugins.meters import Meters
from keyloft.plugins.usage import PluginUsage
from keyloft.semantic.monitoring import Signals
from keyloft.semantic.store import SemanticStore


class ShownSetting(Struct, frozen=True, kw_only=True):
    """A setting, without what must stay secret."""

    name: str
    value: str
    is_default: bool
    flag: str
    environment: str
    description: str


class NatsState(Struct, frozen=True, kw_only=True):
    """The connection to NATS."""

    is_connected: bool
    addresses: Sequence[str]
    is_own: bool
    """Whether the service runs the NATS server itself."""


class ServiceParts:
    """The parts of a service. The semantic store is set once it is open."""

    def __init__(
        self,
        *,
        meters: Meters,
        tenants: ServiceMeters,
        usage: PluginUsage,
        signals: Signals,
        nats: Callable[[], NatsState],
        settings: Sequence[ShownSetting] = (),
        database_file: Path | None = None,
        is_read_only: bool = False,
    ) -> None:
        """Args:
        meters: The counters of the plugin service.
        tenants: The counters of the semantic service.
        usage: What plugins store, and their quotas.
        signals: The counters and alerts of the semantic store.
        nats: Returns the state of the connection to NATS.
        settings: As the service was started with.
        database_file: The file of the database, if it is one.
        is_read_only: Whether the page changes nothing, whatever a token may do.
        """
        self.meters = meters
        self.tenants = tenants
        self.usage = usage
        self.signals = signals
        self.nats = nats
        self.settings = settings
        self.database_file = database_file
        self.is_read_only = is_read_only
        self.semantic: SemanticStore | None = None
        self.started = datetime.now(UTC)
