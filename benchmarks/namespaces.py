"""Two network namespaces with a link between them: machines of which only the network is another one."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

INTERFACE = "link"  # has this name on both sides
BURST, QUEUE = "256kb", "50ms"  # what a limited link lets pass at once, and how long a packet may wait for its turn
_CLONE_NEWNET = 0x40000000


class NoNamespaces(Exception):
    """Network namespaces cannot be made here, for want of rights or of iproute2."""


@dataclass(frozen=True)
class Link:
    """Sides are 0 and 1."""

    names: tuple[str, str]  # of the namespaces
    hosts: tuple[str, str]  # addresses

    @contextmanager
    def inside(self, side: int) -> Iterator[None]:
        """Sockets that this thread makes, and the processes and threads that it starts, are on that side."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(f"/run/netns/{self.names[side]}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
            yield
        finally:
            _enter(before)
            os.close(before)
            os.close(there)

    def sent_bytes(self, side: int) -> int:
        """From this side to the other, with all that the network adds."""
        return self._counted(side, "tx_bytes")

    def sent_packets(self, side: int) -> int:
        return self._counted(side, "tx_packets")

    def _counted(self, side: int, what: str) -> int:
        shown = _ip("netns", "exec", self.names[side], "cat", f"/sys/class/net/{INTERFACE}/statistics/{what}")
        return int(shown)


@contextmanager
def linked(rate: str | None = None) -> Iterator[Link]:
    """Two namespaces that are gone afterwards; `rate` limits each direction, in the words of tc ("1gbit").

    Raises `NoNamespaces`.
    """
    own = os.getpid()
    link = Link((f"squall-{own}-0", f"squall-{own}-1"), ("10.78.0.1", "10.78.0.2"))
    with ExitStack() as made:
        for name in link.names:
            _ip("netns", "add", name)
            made.callback(_ip, "netns", "del", name)
        ends = [("name", INTERFACE, "netns", name) for name in link.names]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, host in zip(link.names, link.hosts):
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _ip("-n", name, "link", "set", "dev", interface, "up")
            if rate is not None:
                limit = ("tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
                _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", INTERFACE, "root", *limit)
        yield link


def _ip(*arguments: str) -> str:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoNamespaces("iproute2 is not installed: apt install iproute2") from None
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip()}; it takes root")
    return done.stdout


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
