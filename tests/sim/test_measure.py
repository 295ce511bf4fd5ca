"""What a machine is measured to do becomes a cluster file; nothing is left behind, however it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.cli import main
from squall.errors import TaskError
from squall.launchers.control_pipe import ControlPipe
from squall.sim.cluster import measure as measuring
from squall.sim.cluster import quiet
from squall.sim.cluster.forks import answer, forked
from squall.sim.cluster.jitter import Trace
from squall.sim.cluster.measure import measure, write
from squall.sim.cluster.measure_run import overhead_of
from squall.sim.cluster.measure_steps import MOST_TIMES, quantiles, running_counts, slowdowns
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import Overhead
from squall.sim.cluster.quiet import FEWEST_TURNS, Moment, Stopwatch, calmest, quickest
from squall.sim.cluster.split_step import PipelineStep
from tests import deep
from tests.tasks import mean_square, regression
from tests.warm import Warm, be_squall, warm_process

FILE = """
import os, signal
import squall, torch
from tests.tasks import mean_square, regression

STARTED = os.getpid()

def stand_still(where):
    if os.getpid() != STARTED and os.environ["STAND_STILL"] == where:
        os.write(1, f"{where}\\n".encode())  # at once: two processes may stand still at a time
        signal.pause()

def optimizer(parameters):
    stand_still("in a shard")
    return torch.optim.SGD(parameters, lr=0.1)

strategy = squall.Synchronous(replicas=2, optimizer=optimizer)

def loss(model, batch):
    stand_still("in a step")
    return mean_square(model, batch)

def task():
    return regression(loss=loss)()
"""


SMALL = (100, 2000), 1 << 20  # elements of vectors, and what is copied
SMALL_MOMENT_S = 0.02


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SIZES", SMALL[0])
    monkeypatch.setattr(measuring, "COPIED_BYTES", SMALL[1])
    monkeypatch.setattr(quiet, "MOMENT_S", SMALL_MOMENT_S)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """Of the processes that a test starts; others may have left some that serve them all."""
    warm_process()
    before = children()
    yield
    assert set(children()) <= set(before)  # of those some may end meanwhile


def children() -> list[str]:
    """Started by this process, and not reaped."""
    return sorted(pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split())


@pytest.mark.usefixtures("small")
def test_a_machine_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_others_s", lambda: 0.0)  # so that every turn is a calm one, whatever runs beside
    strategy = squall.Downpour(replicas=3, optimizer=partial(torch.optim.Adagrad, lr=0.1))
    measured = measure(regression(), strategy, seconds=0.4, trace_file="mine.steps.txt", busy=True)
    machine = measured.machine
    assert (machine.cores, machine.slowdown[0], len(machine.slowdown)) == (2, 1.0, 2)
    assert machine.step_s == pytest.approx(statistics.fmean(measured.steps), rel=1e-3)
    assert len(measured.steps) >= (FEWEST_TURNS + 1) // 2
    assert (measured.elements, measured.batch_size) == (73, 16)
    assert [elements for elements, _ in machine.exchange] == [73, 100, 2000]
    assert all(seconds > 0 for _, seconds in machine.exchange)
    assert [elements for elements, _ in machine.reduce] == [73, 100]
    assert all(seconds > 0 for _, seconds in machine.reduce)
    assert machine.memory > 0
    assert machine.single_s is not None
    assert machine.single_s > 0
    code = machine.overhead
    assert code.lease_s > 0
    assert min(code.batch_s, code.exchange_s, code.serve_s, code.wake_s, code.cold_s) >= 0, (
        "differences of what takes a tenth of a second here"
    )
    assert write(measured.cluster, tmp_path / "mine.toml", "first\nsecond") == [tmp_path / "mine.steps.txt"]
    assert (tmp_path / "mine.toml").read_text().startswith("# first\n# second\n\n[[machines]]\n")
    assert Cluster.load(tmp_path / "mine.toml") == measured.cluster
    assert isinstance(machine.jitter, Trace)
    assert statistics.fmean(machine.jitter.times) == pytest.approx(machine.step_s, rel=1e-3)


@pytest.mark.usefixtures("small")
@deep.only
def test_parts_are_measured_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SENT", (1, 2000))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    task = dataclasses.replace(regression()(), model=model, split=squall.Pipeline(microbatches=4))
    measured = measure(lambda: task, seconds=0.4, parts=2, busy=True)
    assert [elements for elements, _ in measured.machine.send] == [1, 2000]
    assert 0 < measured.machine.send[0][1] <= measured.machine.send[1][1]
    assert isinstance(measured.split, PipelineStep)
    assert (measured.split.microbatches, measured.split.passed) == (4, (16 * 8,))
    write(measured.cluster, tmp_path / "parts.toml", "")
    assert Cluster.load(tmp_path / "parts.toml") == measured.cluster


@pytest.mark.usefixtures("small")
def test_the_users_code_failing_in_a_measured_process_is_told_with_its_traceback() -> None:
    here = os.getpid()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert os.getpid() == here, "not at home"
        return mean_square(model, batch)

    with pytest.raises(TaskError, match=r"(?s)Traceback.*not at home"):
        measure(regression(loss=loss), seconds=0.2)


@pytest.mark.usefixtures("small")
def test_a_failing_shard_ends_the_measurement() -> None:
    here = os.getpid()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        assert os.getpid() == here, "no optimizer here"
        return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(TaskError, match="no optimizer here"):
        measure(regression(), squall.Downpour(optimizer=optimizer), seconds=0.2, busy=True)


@pytest.mark.parametrize(("settings", "remedy"), [({"seconds": 0.0}, "positive"), ({"threads": 0}, "at least 1")])
def test_settings_that_cannot_be(settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        measure(regression(), **settings)


def test_sizes_that_memory_does_not_hold_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_free_bytes", lambda: 200_000_000)
    assert measuring._by_size(
        lambda elements, optimizer, seconds: elements * 1e-9, [1_000, 1_000_000, 10_000_000], 40, torch.optim.SGD, 1.0
    ) == ((1_000, 1e-6), (1_000_000, 1e-3))


def test_a_round_is_what_it_takes_beyond_steps_of_as_many() -> None:
    """Of turns the median; with one core, two steps take twice as long as one."""
    two_cores = [[_said(0.010), _said(0.012), _said(0.5), _said(0.012 + beyond)] for beyond in (0.003, 0.9, 0.002)]
    assert measuring._beyond_steps(two_cores, 2) == pytest.approx(0.003)
    assert measuring._beyond_steps([[_said(0.010), _said(0.5), _said(0.027)]], 1) == pytest.approx(0.007)
    assert measuring._beyond_steps([[_said(0.010), _said(0.5), _said(0.019)]], 1) == measuring.LEAST_S


def _said(seconds: float) -> Moment:
    return Moment(0.0, [{"times": [seconds]}])


@deep.only
@pytest.mark.usefixtures("small")
def test_where_replicas_form_no_group_all_else_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **named: object) -> None:
        raise RuntimeError("nobody comes")

    monkeypatch.setattr("squall.runtime.collective.meeting.meet", refused)
    machine = measure(regression(), seconds=0.3, busy=True).machine
    assert machine.reduce == ()
    assert machine.exchange


def test_processes_at_once() -> None:
    assert running_counts(1) == [1]
    assert running_counts(4) == [1, 2, 3, 4]
    assert running_counts(12) == [1, 2, 4, 8, 12]
    assert slowdowns([1], [0.5], 1) == (1.0,)
    assert slowdowns([1, 2, 4], [0.5, 0.6, 1.0], 4) == pytest.approx((1.0, 1.2, 1.6, 2.0))
    assert slowdowns([1, 2, 3], [0.5, 0.4, 0.6], 3) == pytest.approx((1.0, 1.0, 1.2))  # never faster


def test_of_turns_the_calm_ones_count_and_a_quarter_in_any_case() -> None:
    shares = [0.9, 0.02, 0.5, 0.04, 0.8, 0.7, 0.6, 0.65]

    def calm(more: float) -> list[float]:
        return [turn[0].others for turn in calmest([[Moment(share + more, [])] * 2 for share in shares])]

    assert calm(0.0) == [0.02, 0.04]
    assert calm(0.1) == pytest.approx([0.12, 0.14])


def test_half_of_the_turns_count_those_with_the_shortest_steps() -> None:
    turns = [[Moment(0.0, [{"times": [step_s, step_s]}])] for step_s in (0.3, 0.1, 0.2, 0.5, 0.4)]
    assert [turn[0].said[0]["times"][0] for turn in quickest(turns)] == [0.1, 0.2, 0.3]


def _turn(step_s: float, **runs: tuple[float, float]) -> list[Moment]:
    """Runs asleep, awake, rounds and seldom: (replica, shard); a lease takes a coordinator 5 s, and 8 s if it slept."""
    said = [
        {"replica": replica, "shard": shard, "coordinator": 5.0 if name == "rounds" else 8.0}
        for name, (replica, shard) in runs.items()
    ]
    return [Moment(0.0, [{"times": [step_s]}]), *(Moment(0.0, [each]) for each in said)]


def test_overhead_is_what_is_no_step_and_no_pass_over_a_vector() -> None:
    turns = [
        _turn(10.0, asleep=(16.0, 9.0), awake=(15.0, 8.0), rounds=(20.0, 9.0), seldom=(12.0, 9.0)),
        _turn(20.0, asleep=(26.0, 9.0), awake=(25.0, 8.0), rounds=(30.0, 9.0), seldom=(22.0, 9.0)),
        _turn(10.0, asleep=(99.0, 99.0), awake=(90.0, 99.0), rounds=(99.0, 99.0), seldom=(95.0, 99.0)),  # disturbed
    ]
    found = overhead_of(turns, work_s=6.0)
    assert found == Overhead(batch_s=2.0, exchange_s=3.0, serve_s=2.0, lease_s=9.0, wake_s=2.0, cold_s=3.0)


def test_gradients_of_several_batches_that_are_added_up_are_no_code_of_a_batch() -> None:
    turns = [_turn(10.0, asleep=(11.0, 9.0), awake=(11.0, 9.0), rounds=(11.0, 9.0), seldom=(14.0, 9.0))]
    found = overhead_of(turns, work_s=10.0)
    assert (found.batch_s, found.exchange_s, found.serve_s, found.wake_s) == (1.0, 0.0, 0.0, 0.0)


def test_a_machine_that_others_keep_busy_is_refused_with_the_remedy() -> None:
    crowd = [[Moment(0.6, [])], [Moment(0.8, [])]]
    with pytest.raises(ValueError, match=r"other programs have 70% of this machine's cores .*--busy"):
        measuring._calm_enough(crowd, busy=False)
    assert measuring._calm_enough(crowd, busy=True) == pytest.approx(0.7)


def test_what_another_program_takes_of_the_core_is_not_in_the_time_and_is_seen() -> None:
    """Both on one core: each has half of it, and what one computes takes twice as long by the clock."""
    core = min(os.sched_getaffinity(0))

    def spin(line: ControlPipe) -> None:
        os.sched_setaffinity(0, {core})
        line.say(there=True)
        while True:
            pass

    def compute(line: ControlPipe) -> None:
        os.sched_setaffinity(0, {core})
        watch, begun, had = Stopwatch(1), time.perf_counter(), time.process_time()
        line.say(there=True)
        line.hear()
        watch.restart()
        begun, had = time.perf_counter(), time.process_time()
        while time.process_time() < had + 0.2:
            pass
        line.say(measured=watch.seconds(), wall=time.perf_counter() - begun, core=time.process_time() - had)

    with forked([spin, compute]) as lines:
        for line in lines:
            answer(line)
        lines[1].say(go=True)
        said = answer(lines[1])
    assert said["wall"] > 1.5 * said["core"], "they did share it"
    assert said["measured"] == pytest.approx(said["core"], rel=0.2)


def test_others_are_those_that_are_no_children() -> None:
    with subprocess.Popen(["sh", "-c", "echo; while :; do :; done"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()

        def seen() -> tuple[float, float, float]:
            mine = quiet.core_s(child.pid) + quiet.core_s(os.getpid())
            return time.monotonic(), quiet._others_s(), mine

        before = seen()
        while time.monotonic() < before[0] + 0.5:
            pass
        elapsed, others, mine = (b - a for a, b in zip(before, seen()))
        child.kill()
    assert mine > 0
    assert -0.1 < others < len(os.sched_getaffinity(0)) * elapsed - mine + 0.1


def test_many_times_become_few_of_the_same_mean() -> None:
    times = [1 + (i * 7919 % 1000) ** 4 / 1000 for i in range(1000 - 37)]  # some are very long
    few = quantiles(times)
    assert len(few) == MOST_TIMES
    assert list(few) == sorted(few)
    assert statistics.fmean(few) == pytest.approx(statistics.fmean(times), rel=1e-5)
    assert quantiles([3.0, 1.0]) == (1.0, 3.0)


# ---------------------------------------------------------------- the command


def test_an_older_output_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.steps.txt").write_text("1\n")
    assert main(["measure", "task.py"]) == 1
    assert "cluster.steps.txt exists already: write over it with --force" in capsys.readouterr().err
    Path("tasks").mkdir()
    Path("tasks/cluster.toml").touch()
    assert main(["measure", "tasks/task.py:function"]) == 1
    assert "tasks/cluster.toml exists already" in capsys.readouterr().err, "beside the file that is measured"
    assert main(["measure", "task.py", "--out", "tasks"]) == 1
    assert "tasks/cluster.toml exists already" in capsys.readouterr().err
    assert main(["measure", "task.py", "--out", "cluster.json"]) == 1
    assert "does not end in .toml" in capsys.readouterr().err
    assert main(["measure", "task.py", "--output", "no/cluster.toml"]) == 1
    assert "there is no directory no" in capsys.readouterr().err


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Where the command puts sockets: pytest's own folders have names too long for them."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _in_a_session(*squall: Any) -> None:
    os.setsid()
    sys.dont_write_bytecode = True
    be_squall(*squall)


def _in_a_session_in_small(*squall: Any) -> None:
    (measuring.SIZES, measuring.COPIED_BYTES), quiet.MOMENT_S = SMALL, SMALL_MOMENT_S
    _in_a_session(*squall)


def _command(folder: Path, temporary: Path, *arguments: str, stand_still: str = "") -> Warm:
    (folder / "measured.py").write_text(FILE)
    environment = {**os.environ, "TMPDIR": str(temporary), "STAND_STILL": stand_still}
    be = _in_a_session if deep.wanted else _in_a_session_in_small
    return Warm(["measure", "measured.py", *arguments], cwd=folder, env=environment, be=be)


@deep.only
def test_the_command_writes_what_simulate_reads(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "cluster.toml").write_text("old")
    process = _command(tmp_path, temporary, "--seconds", "0.4", "--busy", "--force", "--json")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    document = json.loads(output)
    assert document["cluster"] == "cluster.toml"
    assert Cluster.load(tmp_path / "cluster.toml").machines[0].step_s == document["step_s"]
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.steps.txt", "cluster.toml", "measured.py"}
    assert not list(temporary.glob("squall*"))


@pytest.mark.parametrize("where", ["in a step", "in a shard"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, temporary: Path, where: str) -> None:
    process = _command(tmp_path, temporary, "--seconds", "0.4", "--busy", stand_still=where)
    assert process.stdout.readline() == f"{where}\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate()
    assert (process.returncode, errors.splitlines()[-1]) == (130, "squall: interrupted")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not list(temporary.glob("squall*"))
    assert [path.name for path in tmp_path.iterdir()] == ["measured.py"]
