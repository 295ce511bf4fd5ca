"""Two machines' ends of a link on loopback: what is measured, and what is said of a machine that is not reached."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from squall.survey import links
from squall.survey.links import Ends, Unreached
from squall.transports.certificates import Identity

ROOT = Identity.new_root("a run")


def ends(machine: int, plaintext: bool = False, root: Identity = ROOT) -> tuple[Ends, tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    authority = root.issue(f"machine-{machine}", authority=True)
    return Ends(machine, authority, listener, plaintext), listener.getsockname()


@contextmanager
def attended(end: Ends) -> Iterator[None]:
    """Meanwhile it answers."""
    over = threading.Event()

    def attend() -> None:
        while not over.is_set():
            select.select([end], [], [], 0.01)
            end.attend()

    thread = threading.Thread(target=attend)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        end.close()


@pytest.mark.parametrize("plaintext", [False, True])
def test_a_link_is_measured_again_and_again(plaintext: bool) -> None:
    """Loopback is as near and wide as no network."""
    (here, _), (there, address) = ends(0, plaintext), ends(1, plaintext)
    with attended(there):
        ways = [here.call(1, address, 0.02) for _ in range(2)]
    here.close()
    for way in ways:
        assert 0 < way.round_trip_s < 0.02
        assert way.bytes_s > 10e6
        assert way.carry > 10e6


def test_a_machine_that_is_not_reached_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REACHED_WITHIN_S", 0.3)
    here, address = ends(0)
    here.close()
    here, _ = ends(0)
    with pytest.raises(Unreached, match="refused"):
        here.call(1, address, 0.02)
    there, address = ends(1, root=Identity.new_root("another run"))
    with attended(there), pytest.raises(Unreached, match="not that machine of the run"):
        here.call(1, address, 0.02)
    here.close()
