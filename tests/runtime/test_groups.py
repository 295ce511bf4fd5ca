"""Process groups that can be cut: who waits for a member that is gone has an error at once, and a next group forms."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from squall.runtime import groups
from squall.runtime.groups import Group
from squall.transports.near_meeting import COME_WITHIN_S
from tests import deep
from tests.launchers.processes import wait_for

SOON_S = COME_WITHIN_S / 2  # sooner than by a timeout


class Member:
    """A process that does what it is told: names of `_Work`'s methods, with arguments."""

    def __init__(self, rank: int, directory: Path) -> None:
        context = get_context("fork")
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, rank, directory))
        self.process.start()

    def tell(self, name: str, *arguments: Any) -> None:
        self._line.send((name, *arguments))

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ready(self, within_s: float = 0.01) -> bool:
        return self._line.poll(within_s)

    def answer(self) -> Any:
        """What came of it, or the error's text."""
        assert self._line.poll(30), "no answer"
        return self._line.recv()


class _Work:
    def __init__(self, rank: int, directory: Path) -> None:
        self._rank, self._directory = rank, directory
        self._group: Group | None = None

    def form(self, name: str, members: list[int]) -> int:
        """The number of members."""
        self._group = Group(name, self._directory, members, members.index(os.getpid()))
        return len(self._group.members)

    def connect(self, name: str, members: list[int]) -> int:
        """Have all connections of a group, and leave it: as who hears of a death before it knows that it has them."""
        store = FileStore(str(self._directory / f"group-{name}"), len(members))
        own = members.index(os.getpid())
        self._left = c10d._new_process_group_helper(
            len(members), own, [], dist.Backend("gloo"), store, group_name=c10d.GroupName(name),
            timeout=groups.FOR_EVER,
        )  # fmt: skip
        return len(members)

    def sum(self, elements: int) -> float:
        assert self._group is not None
        values = torch.full((elements,), float(self._rank))
        dist.all_reduce(values, group=self._group.torch)
        return float(values[-1])

    def send(self, to: int) -> float:
        assert self._group is not None
        self._group.torch.send([torch.ones(1)], to, 0).wait()
        return 1.0

    def receive(self, source: int) -> float:
        assert self._group is not None
        self._group.torch.recv([received := torch.zeros(1)], source, 0).wait()
        return float(received)

    def form_beside_a_death(self) -> int:
        """Groups that are used by nobody, and not destroyed, of 50 that form at the moment when a member dies."""
        for number in range(50):
            died, lives = os.pipe()

            def form(name: str = f"beside-{number}", lives: int = lives) -> ProcessGroup:
                group = Group(name, self._directory, [os.getpid()], 0)
                os.close(lives)
                return group.torch

            with suppress(RuntimeError):
                found = groups._while_all_live(form, [died])
                dist.all_reduce(torch.ones(1), group=found)
                dist.destroy_process_group(found)
            os.close(died)
        with suppress(AssertionError):
            wait_for(lambda: not c10d._world.pg_map, 5.0, "the end of all groups")
        return len(c10d._world.pg_map)

    def close(self) -> int:
        """The descriptors that are open afterwards."""
        if self._group is not None:
            self._group.close()
            self._group = None
        return len(os.listdir("/proc/self/fd"))


def _serve(line: Connection, rank: int, directory: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # a thread pool of the testing process is not there after the fork
    work = _Work(rank, directory)
    while True:
        name, *arguments = line.recv()
        try:
            line.send(getattr(work, name)(*arguments))
        except RuntimeError as error:
            line.send(f"{type(error).__name__}: {error}")


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Callable[[int], list[Member]]]:
    started: list[Member] = []

    def start(count: int) -> list[Member]:
        started.extend(Member(rank, tmp_path) for rank in range(count))
        return started

    yield start
    for member in started:
        member.process.kill()
        member.process.join()


def told(members: list[Member], name: str, *arguments: Any) -> list[Any]:
    """The answers of all."""
    for member in members:
        member.tell(name, *arguments)
    return [member.answer() for member in members]


def formed(members: list[Member], name: str) -> None:
    pids = [member.pid for member in members]
    assert told(members, "form", name, pids) == [len(members)] * len(members)


def test_members_form_a_group_and_add_up(members: Callable[[int], list[Member]]) -> None:
    three = members(3)
    formed(three, "first")
    assert told(three, "sum", 1000) == [3.0] * 3


def test_whoever_waits_for_a_dead_member_or_for_one_that_does_has_an_error_at_once(
    members: Callable[[int], list[Member]],
) -> None:
    """Of a ring, some wait for the dead process, and others for those: each cuts what it has when its error comes."""
    five = members(5)
    formed(five, "first")
    survivors = [member for rank, member in enumerate(five) if rank != 2]
    for member in survivors:
        member.tell("sum", 100_000)
    began = time.monotonic()
    os.kill(five[2].pid, signal.SIGKILL)
    waiting = dict.fromkeys(survivors)
    while waiting:
        for member in [member for member in waiting if member.ready()]:
            del waiting[member]
            assert "gloo" in member.answer()
            member.tell("close")
    assert time.monotonic() - began < SOON_S
    for member in survivors:
        member.answer()
    formed(survivors, "second")
    assert told(survivors, "sum", 100_000) == [8.0] * 4


def test_a_member_that_dies_before_all_are_there_is_not_waited_for(
    members: Callable[[int], list[Member]], tmp_path: Path
) -> None:
    three = members(3)
    pids = [member.pid for member in three]
    began = time.monotonic()
    three[0].tell("form", "first", pids)
    wait_for((tmp_path / "group-first").exists, SOON_S, "the group to begin to form")
    os.kill(pids[2], signal.SIGKILL)
    three[2].process.join()
    three[1].tell("form", "first", pids)
    assert "a member died while the group formed" in three[0].answer()
    assert "a member was gone before the group began to form" in three[1].answer()
    formed(three[:2], "second")
    assert time.monotonic() - began < SOON_S


def test_a_member_may_take_longer_for_its_part_than_for_coming(members: Callable[[int], list[Member]]) -> None:
    six = members(6)
    pairs = six[:2], six[2:4], six[4:]
    for number, pair in enumerate(pairs):
        formed(pair, f"pair {number}")
    waits = ("sum", 10), ("send", 1), ("receive", 1)
    for (one, _), what in zip(pairs, waits):
        one.tell(*what)
    assert not pairs[0][0].ready(COME_WITHIN_S + 0.5)
    for (_, other), what in zip(pairs, (("sum", 10), ("receive", 0), ("send", 0))):
        other.tell(*what)
    assert [[member.answer() for member in pair] for pair in pairs] == [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("dies", deep.sweep([True, False], 1))
def test_nobody_goes_on_with_a_group_that_another_member_has_left(
    members: Callable[[int], list[Member]], dies: bool
) -> None:
    one, other = members(2)
    pids = [one.pid, other.pid]
    one.tell("form", "first", pids)
    assert told([other], "connect", "first", pids) == [2]
    if dies:
        other.process.kill()
    assert ("a member died" if dies else "a member has not come") in one.answer()


def test_a_member_that_lives_and_does_not_come_is_waited_for_so_long(members: Callable[[int], list[Member]]) -> None:
    one, other = members(2)
    one.tell("form", "first", [one.pid, other.pid])
    assert not one.ready(COME_WITHIN_S / 2)
    assert "a member has not come to the group" in one.answer()
    formed([one, other], "second")


def test_a_group_leaves_no_descriptor(members: Callable[[int], list[Member]]) -> None:
    two = members(2)
    opened = []
    for number in range(4):
        formed(two, f"group {number}")
        told(two, "sum", 10)
        opened.append(told(two, "close"))
    assert opened[1] == opened[2] == opened[3]


def test_a_group_is_not_held_by_the_thread_in_which_it_has_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may stand still behind that, and the group's descriptors would outlive the group."""
    monkeypatch.setattr(groups, "Thread", Slow)
    formed: Any = object()
    assert groups._while_all_live(lambda: formed, []) is formed
    assert not any(isinstance(thread, Slow) for thread in threading.enumerate())


class Slow(threading.Thread):
    """Ends when somebody waits for it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._awaited = threading.Event()

    def run(self) -> None:
        super().run()
        self._awaited.wait(SOON_S)

    def join(self, timeout: float | None = None) -> None:
        self._awaited.set()
        super().join(timeout)


def test_a_group_that_forms_at_the_moment_of_a_death_is_used_or_destroyed(
    members: Callable[[int], list[Member]],
) -> None:
    (one,) = members(1)
    assert told([one], "form_beside_a_death") == [0]
