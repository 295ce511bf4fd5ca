"""The nursery, without a run."""

import os
import signal
import time
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from squall import Downpour, Settings
from squall.errors import SquallError
from squall.launchers import backups
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.coordinator_line import PipeLine
from squall.launchers.nursery import Nursery
from squall.launchers.nursery_main import _serve
from squall.launchers.orders import Member
from squall.plan import make_plan
from squall.protocol.events import MessageArrived
from squall.protocol.frames import Frame
from squall.protocol.nodes import COORDINATOR, DEPUTY, Node
from squall.protocol.nursery_messages import ProcessLost, StartProcess
from squall.runtime.arena import Arena, Shape
from squall.runtime.deputing import Kept
from squall.runtime.job import Job, private_job
from squall.runtime.journal import Journal
from squall.transports.certificates import Identity
from squall.transports.doorbell import PATH_BYTES
from squall.usercode.shipping import ship
from squall.vector import Layout
from tests.launchers.processes import wait_for
from tests.tasks import regression

SOON_S = 10.0


def test_a_child_that_cannot_be_watched_does_not_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    job = SimpleNamespace(arena=Arena.private(Shape(length=1, replicas=1)), deputies={})
    nursery = Nursery(ControlPipe(theirs), job, tmp_path)  # type: ignore[arg-type]
    forked: list[int] = []

    def refused(pid: int) -> int:
        forked.append(pid)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refused)
    nursery._replace(Node("replica", 0, 1))
    assert isinstance(nursery._line, PipeLine)
    told = nursery._line.give().hear()
    why = "could not be started: [Errno 24] Too many open files"
    assert told is not None
    assert msgspec.convert(told["frame"], Frame).message == ProcessLost(Node("replica", 0, 1), why)
    with pytest.raises(ProcessLookupError):
        os.kill(forked[0], 0)
    ours.close()


def test_replicas_take_the_gpus_of_their_machine_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their slots are: the others are on other machines. One that is replaced leaves its turn free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("squall.launchers.nursery.run_role", tell_device)
    ours, theirs = Pipe()
    strategy = Downpour(replicas=8)
    task = regression()()
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    job = private_job(make_plan(strategy, Settings(), device="cuda"), strategy, task, layout, tmp_path)
    nursery = Nursery(ControlPipe(theirs), job, tmp_path)

    def device(node: Node) -> str:
        nursery._fork(node)
        file = tmp_path / str(node)
        wait_for(file.exists, SOON_S, f"{node} to tell")
        return file.read_text()

    try:
        assert device(Node("evaluator", 8)) == "cuda:2"
        assert [device(Node("replica", slot)) for slot in (1, 4, 7)] == ["cuda:0", "cuda:1", "cuda:2"]
        lost = next(child for child in nursery._children.values() if child.node.index == 4)
        os.kill(lost.pid, signal.SIGKILL)
        nursery._reap(nursery._children.pop(lost.handle))
        assert device(Node("replica", 2)) == "cuda:1"
        assert device(Node("replica", 3)) == "cuda:0"
    finally:
        nursery._kill_all()
        for child in nursery._children.values():
            os.waitpid(child.pid, 0)
        ours.close()


def test_replicas_of_a_run_that_has_failed_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for whoever is gone. Shards still write what they have to."""
    monkeypatch.setattr("squall.launchers.nursery.run_role", lambda *_: signal.pause())
    ours, theirs = Pipe()
    job = SimpleNamespace(site=None, recipe=SimpleNamespace(shards=1), deputies={})
    nursery = Nursery(ControlPipe(theirs), job, tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr("squall.launchers.nursery.replace", lambda job, **_: job)
    try:
        for node in (Node("shard", 0), Node("replica", 0)):
            nursery._fork(node)
        shard, replica = nursery._children.values()
        nursery._end = {"status": "failed", "reason": "shard 1 was lost"}
        nursery._ended()
        assert wait([replica.handle, shard.handle], SOON_S) == [replica.handle]
        nursery._reap(nursery._children.pop(replica.handle))
        assert not ours.poll(), "nobody is told that it was lost"
    finally:
        nursery._kill_all()
        for child in nursery._children.values():
            os.waitpid(child.pid, 0)
        ours.close()


def tell_device(job: Job, node: Node, sockets: Path, pipe: ControlPipe | None) -> None:
    told = sockets / f"{node}.part"
    told.write_text(str(job.device(node.index)))
    told.rename(sockets / str(node))
    signal.pause()


def test_a_machine_without_a_gpu_takes_no_part_in_a_run_that_computes_on_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head says which machine it is (test_gathering.py)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pipes = [Pipe(), Pipe()]
    head, attendant = (ControlPipe(theirs) for _, theirs in pipes)
    member = Member(1, Identity.new_root("machine-1"), "10.0.0.1", attendant, tmp_path)
    message = {"plan": SimpleNamespace(device="cuda"), "code": ship({})}
    _serve(head, message, tmp_path / "sockets", member)
    for ours, _ in pipes:
        said = ControlPipe(ours).hear()
        assert said is not None
        assert said["kind"] == "failed"
        assert said["error"].startswith("device 'cuda': torch sees no CUDA GPU here")
        ours.close()


def test_a_temporary_folder_with_a_name_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    nursery = Nursery(ControlPipe(theirs), None, tmp_path / ("d" * PATH_BYTES))  # type: ignore[arg-type]
    with pytest.raises(SquallError, match="set TMPDIR to a shorter path"):
        nursery.prepare()
    ours.close()


def test_who_speaks_all_the_time_keeps_no_deadline_from_coming(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    nursery = Chatty(ControlPipe(theirs), SimpleNamespace(site=None), tmp_path)  # type: ignore[arg-type]
    nursery.always = os.eventfd(1)
    nursery._deadline = time.monotonic()
    nursery.watch()
    assert nursery.heard < 100
    os.close(nursery.always)
    ours.close()


class Chatty(Nursery):
    """There is always something to hear, until its time is over."""

    heard = 0
    always: int  # a descriptor that is readable

    def _sources(self) -> list[Any]:
        return [self.always]

    def _attend(self, source: object) -> None:
        self.heard += 1

    @property
    def _stays(self) -> bool:
        return not self._killing and self.heard < 100


@pytest.mark.parametrize("leads", [True, False])
def test_what_a_killed_deputy_has_kept_is_removed_unless_it_was_to_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    """What it has told its nursery counts, though it dies before it has ended."""
    ours, theirs = Pipe()
    (directory := tmp_path / "run.machine-1").mkdir()
    job = SimpleNamespace(
        deputies={DEPUTY: Kept(Journal(bytearray(1 << 10)), directory, os.open(directory, os.O_RDONLY))}, legacies={}
    )
    nursery = Nursery(ControlPipe(theirs), job, tmp_path)  # type: ignore[arg-type]
    begun: list[Node] = []

    def begin(node: Node, ends: Node) -> None:
        os.close(job.deputies.pop(ends).lock)
        begun.append(node)

    monkeypatch.setattr(nursery, "_replace", begin)
    if leads:
        nursery._linked.machine.on(MessageArrived(DEPUTY, StartProcess(COORDINATOR, ends=DEPUTY)), 0.0)
    nursery._tell(backups.ended(nursery._job, DEPUTY, "killed by SIGKILL"))
    assert directory.exists() is leads
    assert begun == [COORDINATOR] * leads
    assert not job.deputies
    ours.close()
