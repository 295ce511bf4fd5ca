"""A machine that is looked at, as a process of its own: it answers, and ends when nobody asks any more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from typing import Any

import msgspec
import pytest
import torch

from squall.launchers.control_pipe import ControlPipe
from squall.sim.cluster import measure as measuring
from squall.sim.cluster import quiet
from squall.survey.machine import serve
from squall.survey.messages import Called, Failed, Listens, Looked, Measured, understood
from squall.transports.certificates import Identity
from tests.tasks import regression

SOON_S = 30.0
IDENTITY = Identity.new_root("a run").issue("machine-0", authority=True)
MESSAGE = {"plaintext": False, "task": regression(), "strategy": None, "threads": 1, "busy": True}


class Process:
    def __init__(self, message: dict[str, Any]) -> None:
        mine, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            mine.close()
            torch.set_num_threads(1)  # as a nursery does, before it forks
            try:
                serve(ControlPipe(theirs), message, None)
            finally:
                os._exit(0)
        theirs.close()
        self.line = ControlPipe(mine)

    def ask(self, **question: Any) -> Any:
        self.line.say(**question)
        assert self.line.connection.poll(SOON_S)
        said = self.line.hear()
        assert said is not None
        return understood(said)


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    found = Process({**MESSAGE, **getattr(request, "param", {})})
    yield found
    found.line.connection.close()
    assert os.waitpid(found.pid, 0) == (found.pid, 0)  # it ends by itself


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that show that they are made."""
    monkeypatch.setattr(measuring, "SIZES", (1000,))
    monkeypatch.setattr(measuring, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(quiet, "MOMENT_S", 0.01)


@pytest.mark.usefixtures("short")
def test_it_is_looked_at_called_and_measured(process: Process) -> None:
    looked = process.ask(kind="look")
    assert isinstance(looked, Looked)
    assert "memory" in {finding.name for finding in looked.findings}
    listens = process.ask(kind="listen", identity=msgspec.to_builtins(IDENTITY))
    assert isinstance(listens, Listens)
    called = process.ask(kind="call", machine=7, host="192.0.2.1.nowhere", port=1, seconds=0.1)
    assert isinstance(called, Called)
    assert "not known here" in called.why
    measured = process.ask(kind="measure", cores=1, seconds=0.1)
    assert isinstance(measured, Measured)
    assert measured.cores == 1
    assert measured.step_s > 0


def broken() -> None:
    raise RuntimeError("no such disk")


@pytest.mark.parametrize("process", [{"task": broken}], indirect=True)
def test_what_the_users_code_raises_is_told(process: Process) -> None:
    failed = process.ask(kind="measure", cores=1, seconds=0.1)
    assert isinstance(failed, Failed)
    assert failed.task
    assert "no such disk" in failed.error
    assert isinstance(process.ask(kind="look"), Looked)  # it is there still
