"""Processes of one machine come to have connections to each other, or learn soon that one of them does not come."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from squall.transports import near_meeting
from squall.transports.mesh import MeshBroken
from squall.transports.near_meeting import DIED, NOT_COME, meet
from tests.launchers.processes import wait_for

SOON_S = near_meeting.COME_WITHIN_S / 2


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(5) as pool:
        yield pool


@pytest.fixture
def stays() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives and does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def failure(found: Future[dict[int, socket.socket]], within_s: float = SOON_S) -> str:
    error = found.exception(within_s)
    assert isinstance(error, MeshBroken)
    return str(error)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_has_a_connection_to_each(threads: ThreadPoolExecutor, tmp_path: Path, count: int) -> None:
    pids = [os.getpid()] * count
    last_first = [threads.submit(meet, tmp_path, "one", pids, own) for own in reversed(range(count))]
    met = [found.result(SOON_S) for found in reversed(last_first)]
    for own, connections in enumerate(met):
        for place, connection in connections.items():
            connection.send(f"{own} to {place}".encode())
    for own, connections in enumerate(met):
        assert sorted([*connections, own]) == list(range(count))
        for place, connection in connections.items():
            assert connection.recv(100) == f"{place} to {own}".encode()
            connection.close()


def test_who_dies_before_all_are_there_is_not_waited_for(
    threads: ThreadPoolExecutor, tmp_path: Path, stays: subprocess.Popen[bytes]
) -> None:
    pids = [os.getpid(), os.getpid(), stays.pid]
    found = [threads.submit(meet, tmp_path, "one", pids, own) for own in range(2)]
    wait_for((tmp_path / "one-0").exists, SOON_S, "somebody to listen")
    stays.kill()
    assert [failure(each) for each in found] == [DIED] * 2
    stays.wait()
    with pytest.raises(MeshBroken, match="a member was gone before the group began to form"):
        meet(tmp_path, "two", pids, 0)


def test_who_lives_and_does_not_come_is_waited_for_so_long(
    threads: ThreadPoolExecutor, tmp_path: Path, stays: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_meeting, "COME_WITHIN_S", 0.3)
    for own, missing in ((0, 1), (1, 0)):  # who would call, and who is to be called
        pids = [os.getpid()] * 2
        pids[missing] = stays.pid
        assert failure(threads.submit(meet, tmp_path, f"{own}", pids, own)) == NOT_COME


def test_who_calls_and_stands_still_keeps_nobody_from_hearing_of_a_death(
    threads: ThreadPoolExecutor, tmp_path: Path, stays: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_meeting, "SAYS_WITHIN_S", 0.1)
    found = threads.submit(meet, tmp_path, "one", [os.getpid(), stays.pid], 0)
    wait_for((tmp_path / "one-0").exists, SOON_S, "somebody to listen")
    with socket.socket(socket.AF_UNIX) as caller:
        wait_for(lambda: not caller.connect_ex(str(tmp_path / "one-0")), SOON_S, "somebody to listen")
        stays.kill()
        assert failure(found) in (DIED, NOT_COME)


def test_who_hangs_up_before_it_says_who_it_is_has_died(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    found = threads.submit(meet, tmp_path, "one", [os.getpid()] * 2, 0)
    wait_for((tmp_path / "one-0").exists, SOON_S, "somebody to listen")
    with socket.socket(socket.AF_UNIX) as caller:
        wait_for(lambda: not caller.connect_ex(str(tmp_path / "one-0")), SOON_S, "somebody to listen")
    assert failure(found) == DIED
