"""A head that goes on where the run's first one was lost gives what the run has left to whoever it has begun with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Pipe
from pathlib import Path

import cloudpickle
import msgspec
import pytest

import squall
from squall.launchers import second_head
from squall.launchers.completing import complete
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.joining.call import Call
from squall.launchers.joining.joining import Membership, join
from squall.launchers.joining.token import Token
from squall.launchers.orders import Facts
from squall.launchers.roster import Step
from squall.launchers.second_head import SecondHead
from squall.plan import make_plan
from squall.protocol.effects import End
from squall.settings import Settings
from tests.launchers import blobs
from tests.launchers.test_completing import kinds, run

OVER = ["started", "finished"]


class Led:
    """Machine 1 leads; others join, of which some have a directory of the run."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory, self._tmp_path = run(tmp_path / "second", OVER), tmp_path
        settings = Settings(copies=2, machines=3, listen="127.0.0.1:0")
        (tmp_path / "task").write_bytes(cloudpickle.dumps({"plan": make_plan(squall.Downpour(replicas=2), settings)}))
        self.token, (own, self._nursery) = Token.for_all(), Pipe()
        said = {
            "machine": 1, "number": 3, "host": "127.0.0.1", "directory": str(self.directory), "seats": [],
            "facts": msgspec.to_builtins(Facts.of(blobs.task())), "addresses": {},
        }  # fmt: skip
        self.head = SecondHead(Call(("127.0.0.1", 0), self.token, 60.0), said, ControlPipe(own), tmp_path / "task")
        self.joined: list[Membership] = []

    def first(self, name: str) -> Path:
        """A machine that the run has begun with, whose directory lacks something, has joined, and has ended."""
        directory = run(self._tmp_path / name, ["started"])
        self.join(directory, Step.ENDED)
        return directory

    def join(self, directory: Path | None, step: Step) -> None:
        with ThreadPoolExecutor() as pool:
            joining = pool.submit(join, self._call(directory), lambda text: None)
            while not joining.done():
                self.head.attend()
        self.joined.append(joining.result())
        assert self.head._guests is not None
        while (number := self.joined[-1].machine) not in self.head._guests.machines:
            self.head.attend()
        self.head._guests.machines[number].step = step

    def ends(self) -> threading.Thread:
        thread = threading.Thread(target=self.head.close, args=(End("finished", "all data is trained"),))
        thread.start()
        return thread

    def complete(self, directory: Path, number: int) -> Path:
        return complete(self._call(directory), directory, number)

    def _call(self, directory: Path | None) -> Call:
        return Call(self.head.reached, self.token, 60.0, directory=directory)

    def close(self) -> None:
        self._nursery.close()
        for member in self.joined:
            member.pipe.close()


@pytest.fixture
def led(tmp_path: Path) -> Iterator[Led]:
    with closing(Led(tmp_path)) as made:
        yield made


def test_who_calls_before_all_machines_have_ended_waits_for_that(led: Led) -> None:
    first = led.first("first")
    led.join(None, Step.BEGUN)  # and says nothing
    ending = led.ends()
    led.complete(first, led.joined[0].machine)
    ending.join()
    assert kinds(first) == OVER


def test_two_are_given_to_at_the_same_time(led: Led) -> None:
    directories = [led.first("first"), led.first("another")]
    ending = led.ends()
    with ThreadPoolExecutor() as pool:
        numbers = [member.machine for member in led.joined]
        assert [path.name for path in pool.map(led.complete, directories, numbers)] == ["before", "before"]
    ending.join()
    assert [kinds(directory) for directory in directories] == [OVER, OVER]


def test_who_never_calls_is_not_waited_for_long(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_head, "FETCHES_WITHIN_S", 0.2)
    led.first("first")
    ending = led.ends()
    ending.join(20)
    assert not ending.is_alive()


def test_before_the_end_nothing_is_given(led: Led) -> None:
    first = led.first("first")
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(led.complete, first, led.joined[0].machine)
        while not asking.done():
            led.head.attend()
    with pytest.raises(ValueError, match="the run has not ended"):
        asking.result()
    led.head.close()
