"""The nursery, without a run."""

import os
import signal
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from squall.errors import SquallError
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.coordinator_line import PipeLine
from squall.launchers.nursery import Nursery
from squall.protocol.frames import Frame
from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import ProcessLost
from squall.runtime.arena import Arena, Shape
from squall.transports.doorbell import PATH_BYTES


class Waiting(Nursery):
    """Its children wait to be killed."""

    def _become(self, node: Node) -> None:
        signal.pause()


def test_a_child_that_cannot_be_watched_does_not_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    job = SimpleNamespace(arena=Arena.private(Shape(length=1, replicas=1)))
    nursery = Waiting(ControlPipe(theirs), job, tmp_path)  # type: ignore[arg-type]
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


def test_a_temporary_folder_with_a_name_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    nursery = Nursery(ControlPipe(theirs), None, tmp_path / ("d" * PATH_BYTES))  # type: ignore[arg-type]
    with pytest.raises(SquallError, match="set TMPDIR to a shorter path"):
        nursery.prepare()
    ours.close()
