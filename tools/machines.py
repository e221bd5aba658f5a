"""Machines for clusters: all on loopback, or each in a network namespace of its own, which can be cut off.

Namespaces need root and Linux. They are held open by processes of this one: nothing of them is left when it ends.
"""

import os
import random
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

NO_NAMESPACES: Final = "networks can't be cut here: that needs Linux, root, and the programs ip, nsenter and unshare"
_SECONDS: Final = 10.0
# No machine has this address: what is sent to it is lost, as on a cut wire.
_NOWHERE: Final = "02:00:00:00:00:01"


class Machine:
    """Where programs run: an address, and how they are started there."""

    def __init__(self, host: str, namespace: int | None = None, link: str = "") -> None:
        self.host = host
        self._namespace = namespace
        self.link = link
        """The name of its connection at the switch, if it has a network of its own."""

    @property
    def command(self) -> list[str]:
        """What stands before a program's own command line, to start it on this machine."""
        return [] if self._namespace is None else ["nsenter", "--net", f"--target={self._namespace}"]

    def free_ports(self, count: int) -> list[int]:
        """Ports on which no program listens, here or on another machine: the names of Unix sockets hold them, too."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            return [one.getsockname()[1] for one in sockets]

    def ip(self, *lines: str) -> None:
        """Change the network of this machine."""
        _ip(self._namespace, lines)


class MachineGroup:
    """Some machines of servers, and the network between them and this process."""

    def __init__(self, machines: list[Machine], switch: int | None = None, client: Machine | None = None) -> None:
        self.machines = machines
        self.client = client
        """One more machine, for a client that can be cut off."""
        self._switch = switch
        self.can_cut = switch is not None

    def cut_off(self, machine: Machine) -> None:
        """No packet goes to or from it."""
        assert self._switch is not None, NO_NAMESPACES
        _ip(self._switch, [f"link set {machine.link} down"])

    def cut_from_others(self, machine: Machine) -> None:
        """Clients reach it, the other machines don't."""
        assert self._switch is not None, NO_NAMESPACES
        others = [other for other in self.machines if other is not machine]
        machine.ip(*[f"neigh replace {other.host} lladdr {_NOWHERE} dev eth0 nud permanent" for other in others])
        for other in others:
            other.ip(f"neigh replace {machine.host} lladdr {_NOWHERE} dev eth0 nud permanent")

    def mend(self) -> None:
        """Every machine reaches every other one again."""
        if self._switch is not None:
            machines = [*self.machines, *([] if self.client is None else [self.client])]
            _ip(self._switch, [f"link set {machine.link} up" for machine in machines])
            for machine in machines:
                machine.ip("neigh flush dev eth0 nud permanent")


def loopback(count: int) -> MachineGroup:
    """All on 127.0.0.1; they differ by their ports."""
    return MachineGroup([Machine("127.0.0.1") for _ in range(count)])


@contextmanager
def namespaces(count: int) -> Iterator[MachineGroup]:
    """Machines for servers and one for a client, each in a network of its own, joined by a switch.

    This process is connected to the switch, too.
    """
    subnet = f"10.{random.randrange(64, 250)}.{random.randrange(250)}"
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace())
        held = [stack.enter_context(_namespace()) for _ in range(count + 1)]
        link = f"kl{os.getpid()}"
        _ip(None, [f"link add {link} type veth peer name here netns {switch}"])
        _ip(None, [f"address add {subnet}.254/24 dev {link}", f"link set {link} up"])
        _ip(switch, ["link add switch type bridge", "link set switch up"])
        _ip(switch, ["link set here master switch", "link set here up"])
        for number, pid in enumerate(held):
            _ip(switch, [f"link add m{number} type veth peer name eth0 netns {pid}"])
            _ip(switch, [f"link set m{number} master switch", f"link set m{number} up"])
            _ip(pid, [f"address add {subnet}.{number + 1}/24 dev eth0", "link set eth0 up", "link set lo up"])
        *machines, client = [Machine(f"{subnet}.{at + 1}", pid, f"m{at}") for at, pid in enumerate(held)]
        yield MachineGroup(machines, switch, client)


def can_cut() -> bool:
    """Whether `namespaces` works here."""
    try:
        with _namespace() as pid:
            _ip(pid, ["link add switch type bridge"])
    except (OSError, RuntimeError):
        return False
    return True


@contextmanager
def _namespace() -> Iterator[int]:
    """A network namespace that lives as long as the process whose id this yields: until the pipe to it closes."""
    if os.geteuid():
        raise RuntimeError(NO_NAMESPACES)
    with subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    ) as holder:
        own, deadline = Path("/proc/self/ns/net").readlink(), time.monotonic() + _SECONDS
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == own:
            if holder.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(NO_NAMESPACES)
            time.sleep(0.002)
        yield holder.pid


def _ip(namespace: int | None, lines: Iterable[str]) -> None:
    command = [] if namespace is None else ["nsenter", "--net", f"--target={namespace}"]
    done = subprocess.run(
        [*command, "ip", "-batch", "-"], input="".join(f"{line}\n" for line in lines), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"ip failed: {done.stderr.strip()}")
