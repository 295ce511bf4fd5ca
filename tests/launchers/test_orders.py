"""What the head wants of a nursery that waits."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.orders import Member, Orders


def test_what_was_said_to_processes_that_have_ended_is_passed_over() -> None:
    """The head may have told of a machine that joined, or a user's wish, just before it heard of their end."""
    mine, theirs = Pipe()
    head = ControlPipe(mine)
    for stray in ({"kind": "joined", "machine": 2, "cores": 1}, {"kind": "leave", "why": "enough"}):
        head.say(**stray)
    head.say(kind="place", seats=[], placing=3)
    head.say(kind="kill")
    plan: Any = None
    assert Orders(ControlPipe(theirs)).next(plan) is None
    assert head.hear() == {"kind": "placed", "ports": {}, "placing": 3}


@pytest.mark.parametrize(("gpus", "seen"), [(None, "0,1"), ("1", "1"), ("", "")])
def test_the_first_machine_keeps_to_the_gpus_that_it_was_given(
    gpus: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other ones are those of machines on the same node, or of other programs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    mine, theirs = Pipe()
    head, plan = ControlPipe(mine), SimpleNamespace()
    head.say(kind="launch", directory=str(tmp_path), snapshot=None, gpus=gpus)
    with open(tmp_path / "lock", "w") as lock:
        head.hand(lock.fileno())
    order = Orders(ControlPipe(theirs)).next(plan)  # type: ignore[arg-type]
    assert order is not None
    assert order.directory == tmp_path
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


class Waiting:
    """A machine that has joined, and has said that it is ready, when its user leaves."""

    def __init__(self, directory: Path) -> None:
        (head, self.head), (attendant, self.user) = (map(ControlPipe, Pipe()) for _ in range(2))
        member = Member(1, None, "", attendant, directory)  # type: ignore[arg-type]
        self.orders, self.attendant = Orders(head, member), attendant
        self.began: list[bool] = []
        self.user.say(kind="leave")
        self._thread = threading.Thread(target=lambda: self.began.append(self.orders.may_begin()))
        self._thread.start()
        assert [self.head.hear(), self.head.hear()] == [{"kind": "ready", "placing": 0}, {"kind": "unready"}]
        assert self.user.hear() == {"kind": "listening"}

    def ends(self) -> bool:
        """What `may_begin` has returned."""
        self._thread.join()
        return self.began[0]


def test_who_leaves_when_the_head_counts_on_it_begins_and_leaves_then(tmp_path: Path) -> None:
    """Its shards would be lost else, and the run with them."""
    waiting = Waiting(tmp_path)
    waiting.head.say(kind="begin")
    assert waiting.ends()
    assert waiting.attendant.connection.poll()


def test_who_leaves_when_all_is_placed_anew_has_no_part_in_that(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    waiting.head.say(kind="place", seats=[], placing=1)
    assert not waiting.ends()
    assert waiting.orders.next(None) is None  # type: ignore[arg-type]
    told = waiting.user.hear()
    assert told is not None
    assert told["status"] == "left"


def test_who_leaves_is_sent_away_before_anything_began(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    waiting.head.connection.close()
    assert not waiting.ends()
    told = waiting.user.hear()
    assert told is not None
    assert told["status"] == "left"
