"""What an engine knows about the servers of its database, for health pages, metrics and `keyloft doctor`."""

from msgspec import Struct


class HostHealth(Struct, frozen=True, kw_only=True):
    """One of the hosts of a database."""

    name: str
    role: str
    """primary, standby, read-only, or unreachable; alias (another name of the primary); other cluster (the host does
    not replicate this one's data); other store (it shows the id of another store, as a standby behind a restore)."""
    timeline: int | None = None
    sync_state: str | None = None
    """How the primary treats a standby: sync, quorum, potential or async; None if that is not known."""
    lag: float | None = None
    """How many seconds a standby is behind, at most; None if that is not known."""
    reads: int = 0
    """How many gets and lists the host has answered for this engine; counted only with `reads="standby"`."""


class ServerHealth(Struct, frozen=True, kw_only=True):
    """The servers of a database, as one engine sees them."""

    host: str | None
    """The host that is written to; None while there is none."""
    timeline: int | None
    """The highest timeline that was seen; None if the servers don't report one."""
    synchronous: str | None
    """Which standbys a commit waits for (`synchronous_standby_names`): none if empty; None while that is not known."""
    hosts: tuple[HostHealth, ...]
    failovers: int
    """How many new timelines this engine has met."""
    unknown_commits: int
    """How many calls of this engine got CommitUnknown."""

    @property
    def lines(self) -> list[str]:
        """For a person to read."""
        timeline = f", timeline {self.timeline}" if self.timeline else ""
        waits = {None: "not known", "": "none"}.get(self.synchronous, self.synchronous)
        shown = [
            f"primary {self.host or 'none'}{timeline}",
            f"synchronous standbys {waits}",
            *[_line(host) for host in self.hosts if host.name != self.host],
        ]
        return [*shown, f"failovers {self.failovers}", f"unknown commits {self.unknown_commits}"]


def _line(host: HostHealth) -> str:
    timeline = f", timeline {host.timeline}" if host.timeline else ""
    if host.role != "standby":
        return f"{host.role} {host.name}{timeline}"
    sync_state = f", {host.sync_state}" if host.sync_state else ""
    # The lag is measured against an earlier answer of the primary, so it is an upper bound.
    lag = "lag unknown" if host.lag is None else f"at most {host.lag:.1f} s behind" if host.lag else "not behind"
    return f"standby {host.name}{timeline}{sync_state}, {lag}"
