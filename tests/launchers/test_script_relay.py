"""Scripts elsewhere, as the head sees them: who is told what, and in which order. Nothing runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from squall.launchers import script_relay
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.last_weights import last_weights, take_weights
from squall.launchers.leaving import explain
from squall.launchers.nursery_channel import NurseryChannel
from squall.launchers.script_nursery import ScriptNursery
from squall.launchers.script_relay import ScriptRelay
from squall.protocol.nodes import Node
from squall.transports.stream import PASS_BYTES
from tests.launchers.test_gathering import PORTS, Line, Run

DATA = {"examples": 7, "batch_size": 2, "epochs": 1, "steps": None}
END = {"kind": "end", "status": "finished", "reason": "all data was trained"}
WEIGHTS = torch.arange(3 * PASS_BYTES // 4, dtype=torch.float32)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """That has begun."""
    monkeypatch.setattr(script_relay, "newest", lambda directory: WEIGHTS)
    monkeypatch.setattr(Line, "unsent", 0, raising=False)
    found = Run(tmp_path)
    found.built(0, 1)
    for number in (0, 1):
        found.say(number, kind="placed", ports=PORTS[number])
    for number in (0, 1):
        found.say(number, kind="ready")
    return found


@pytest.fixture
def relay(run: Run, tmp_path: Path) -> ScriptRelay:
    return ScriptRelay(run.gathering, tmp_path)


def test_what_is_trained_on_is_told_to_every_machine_also_to_one_that_comes_later(run: Run, relay: ScriptRelay) -> None:
    run.join()
    data = {"kind": "data", "data": DATA}
    assert relay.hear(0, data)
    assert run.lines[1].said[-1] == data
    run.built(2)
    run.say(2, kind="placed", ports={})
    run.say(2, kind="ready")
    assert [said["kind"] for said in run.lines[2].said[-2:]] == ["begin", "data"]
    assert not relay.hear(1, data), "another machine has nothing to say about it"


def test_the_end_comes_behind_the_weights_and_only_as_fast_as_a_machine_reads(
    run: Run, relay: ScriptRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.join()
    full = Line.send_bytes
    monkeypatch.setattr(Line, "send_bytes", lambda line, data: (full(line, data), setattr(line, "unsent", PASS_BYTES)))
    relay.hear(0, {"kind": "trained", "status": "finished", "reason": "all data was trained"})
    assert run.lines[2].said[-1]["kind"] == "kill", "it had not begun"
    job: Any = SimpleNamespace(
        directory=tmp_path, layout=SimpleNamespace(length=len(WEIGHTS)), site=SimpleNamespace(has=lambda node: False)
    )
    while run.lines[1].said[-1] != END:
        assert last_weights(job) is None
        assert run.lines[1].said[-1]["kind"] == "weights"
        take_weights(tmp_path, run.lines[1].said[-1]["data"])
        run.lines[1].unsent = 0  # type: ignore[attr-defined]
        relay.turn(collected=False)
    assert torch.equal(last_weights(job), WEIGHTS)  # type: ignore[arg-type]
    relay.turn(collected=True)
    relay.turn(collected=True)
    assert run.lines[0].kinds.count("alone") == 1


def test_what_scripts_say_and_how_they_end_comes_to_the_nursery_here_and_its_answer_back(
    run: Run, relay: ScriptRelay
) -> None:
    said = {"kind": "logged", "values": {"accuracy": 0.5}}
    assert relay.hear(1, {"kind": "script", "replica": 2, "said": said})
    assert run.lines[0].said[-1] == {"kind": "script", "machine": 1, "replica": 2, "said": said}
    answer = {"kind": "noted", "machine": 1, "replica": 2, "error": ""}
    assert relay.hear(0, answer)
    assert run.lines[1].said[-1] == answer
    exited = {"kind": "exited", "node": "replica-2.0", "pid": 7, "why": "killed", "traceback": ""}
    assert not relay.hear(1, exited), "the launching process looks at it as well"
    assert run.lines[0].said[-1] == {"kind": "exited", "machine": 1, "node": "replica-2.0", "pid": 7, "why": "killed"}
    relay.lose(1, ended=False)
    assert run.lines[0].said[-1] == {"kind": "gone", "machine": 1}


def test_who_goes_before_the_run_begins_is_no_matter_of_the_nursery_here(tmp_path: Path) -> None:
    """It waits for what it is to launch, and nothing else."""
    run = Run(tmp_path)
    relay = ScriptRelay(run.gathering, tmp_path)
    run.gathering.lose(1)
    relay.lose(1, ended=False)
    assert run.lines[0].said == []


class Nursery(ScriptNursery):
    """Its run has a replica on each of four machines."""

    def __init__(self, directory: Path, line: Line) -> None:
        seats = {("shard", 0): 3} | {("replica", number): number for number in range(4)}
        job: Any = SimpleNamespace(site=SimpleNamespace(cores={0: 2, 1: 2}, seats=seats), restored=None)
        super().__init__(ControlPipe(line), job, directory)  # type: ignore[arg-type]

    def _train_on(self, data: dict[str, Any]) -> None:
        self._trained_on = data


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def nursery(tmp_path: Path, line: Line) -> Nursery:
    return Nursery(tmp_path, line)


def test_a_replica_that_there_is_not_says_nothing(nursery: Nursery, line: Line) -> None:
    begin(nursery, 1)
    begin(nursery, 1000, examples=8)
    assert "failed" not in [each["kind"] for each in line.said]


def test_a_machine_speaks_of_the_replicas_that_the_coordinator_has_started_there(nursery: Nursery, line: Line) -> None:
    begin(nursery, 1)
    begin(nursery, 1, replica=2, examples=8)
    nursery._hear_launcher({"kind": "exited", "machine": 1, "node": "replica-0.0", "pid": 7, "why": "killed"})
    assert line.said == [{"kind": "data", "data": DATA}]
    assert not nursery._unfinished
    NurseryChannel(nursery._line.give()).admit(Node("replica", 2, 1), 1)
    begin(nursery, 2, examples=8)
    assert len(line.said) == 1, "it is there no more"
    begin(nursery, 1, replica=2, examples=8)
    assert "replica 2 on machine 1 has {'examples': 8" in line.said[-1]["error"]


def begin(nursery: Nursery, machine: int, replica: int | None = None, **data: Any) -> None:
    said = {"kind": "begin", **DATA, **data}
    replica = machine if replica is None else replica
    nursery._hear_launcher({"kind": "script", "machine": machine, "replica": replica, "said": said})


def test_other_data_on_a_machine_is_named_with_it(nursery: Nursery, line: Line) -> None:
    begin(nursery, 1)
    assert line.said == [{"kind": "data", "data": DATA}]
    begin(nursery, 2)
    assert len(line.said) == 1
    begin(nursery, 3, examples=8)
    assert "replica 3 on machine 3 has {'examples': 8" in line.said[-1]["error"]
    assert not nursery._stays


def test_a_machine_that_is_lost_before_anybody_trains_ends_the_run(nursery: Nursery, line: Line) -> None:
    nursery._hear_launcher({"kind": "gone", "machine": 7})  # it has joined late
    assert nursery._stays
    nursery._hear_launcher({"kind": "gone", "machine": 1})
    assert line.said[-1]["error"] == "machine 1 was lost before the training began: launch the run again"
    assert not nursery._stays


@pytest.fixture
def trained(nursery: Nursery) -> Nursery:
    begin(nursery, 1)
    nursery._end = {"status": "finished", "reason": "all data was trained"}
    nursery._ended()
    return nursery


@pytest.mark.parametrize("lost", [
    {"kind": "gone", "machine": 1},
    {"kind": "exited", "machine": 1, "node": "replica-1.0", "pid": 7, "why": "killed"},
])  # fmt: skip
def test_scripts_elsewhere_are_awaited_and_missed(
    trained: Nursery, lost: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trained._hear_launcher(lost)
    assert trained._stays
    trained._hear_launcher({"kind": "alone"})
    assert not trained._stays
    assert trained._verdict()["status"] == "finished"
    assert "machine 1" in capsys.readouterr().err


@pytest.mark.parametrize("over", [
    {"kind": "script", "machine": 1, "replica": 1, "said": {"kind": "over"}},
    {"kind": "exited", "machine": 1, "node": "replica-1.0", "pid": 7, "why": explain(0)},
])  # fmt: skip
def test_a_script_that_has_come_to_its_end_is_not_missed_with_its_machine(
    trained: Nursery, over: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    begin(trained, 2)
    trained._hear_launcher(over)
    for machine in (1, 2):
        trained._hear_launcher({"kind": "gone", "machine": machine})
    trained._verdict()
    warned = capsys.readouterr().err
    assert "machine 2 was lost before the scripts there" in warned
    assert "machine 1" not in warned
