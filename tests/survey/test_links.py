"""Two machines' ends of a link on loopback: what is measured, and what is said of a machine that is not reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from squall.errors import SquallError
from squall.sim.cluster.forks import forked
from squall.survey import links
from squall.survey.links import Ends
from squall.transports.certificates import Identity

ROOT = Identity.new_root("a run")


@contextmanager
def called(machine: int, plaintext: bool = False, root: Identity = ROOT) -> Iterator[tuple[str, int]]:
    """One that answers meanwhile; where."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, forked([partial(ends(machine, plaintext, root).attend, listener)]):
        yield listener.getsockname()


def ends(machine: int, plaintext: bool = False, root: Identity = ROOT) -> Ends:
    return Ends(machine, root.issue(f"machine-{machine}", authority=True), plaintext)


@pytest.mark.parametrize("plaintext", [False, True])
def test_a_link_is_measured_again_and_again(plaintext: bool) -> None:
    """Loopback is as near and wide as no network."""
    with called(1, plaintext) as address:
        ways = [ends(0, plaintext).call(1, address, 0.02) for _ in range(2)]
    for way in ways:
        assert 0 < way.round_trip_s < 0.02
        assert way.bytes_s > 10e6
        assert way.carry > 10e6


def test_a_machine_that_is_not_reached_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REACHED_WITHIN_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with pytest.raises(SquallError, match="refused"):
        ends(0).call(1, address, 0.02)
    wrong = pytest.raises(SquallError, match="not that machine of the run")
    with called(1, root=Identity.new_root("another run")) as address, wrong:
        ends(0).call(1, address, 0.02)
