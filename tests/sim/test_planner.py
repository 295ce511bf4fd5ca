"""Plans from end to end: known clusters, an interrupt, the command and its mistakes."""

from __future__ import annotations

import dataclasses
import json
import signal
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.cli import main
from squall.settings import Settings
from squall.sim.cluster.forecast import Forecast
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import FailureLaw, MachineKind, Overhead, Preemption
from squall.sim.cluster.simulate import simulate
from squall.sim.planning import planner
from squall.sim.planning.candidates import Candidate
from squall.sim.planning.page import text, write_picture
from squall.sim.planning.planner import plan_cluster
from squall.sim.planning.ranking import ranked
from squall.sim.planning.reasons import reason
from squall.sim.planning.speed import speed_of
from squall.sim.planning.survival import survival_of
from tests.sim.plan_entries import DILOCO, DOWNPOUR, SYNCHRONOUS, entry
from tests.tasks import mean_square, numbers, regression

SLOW_ONE = Cluster(machines=(
    MachineKind(name="old", step_s=0.1, roles=("replica",)),  # the first, so that every plan has it
    MachineKind(name="worker", count=3, step_s=0.01, roles=("replica",)),
    MachineKind(name="server", cores=2, step_s=0.01, roles=("shard", "coordinator", "evaluator")),
))  # fmt: skip
SGD = partial(torch.optim.SGD, lr=0.1)
BOTH = {"synchronous": squall.Synchronous(optimizer=SGD), "downpour": squall.Downpour(optimizer=SGD)}
TASK = regression(examples=640, validate=numbers(64))

FILE = """
import squall
from tests.tasks import numbers, regression
strategy = squall.Downpour()
task = regression(examples=320, validate=numbers(64))
"""


def test_with_one_slow_machine_synchronous_is_not_first_and_the_reason_says_who_waits() -> None:
    ranking = plan_cluster(TASK, SLOW_ONE, strategies=BOTH)
    assert ranking.first.candidate.family == "downpour"
    alone, synchronous = ranking.shown[1:]
    assert (alone.candidate.family, alone.useful) == ("single_process", pytest.approx(1600, rel=0.01))
    assert "One process alone trains 1,600 examples/s: the first is 3.0 times as fast." in reason(ranking)
    assert synchronous.speed.idle > 0.5
    assert "since its replicas wait" in reason(ranking)
    assert "for the slowest" in reason(ranking)
    # 16 examples in every 0.1 s from the slow one, in every 0.01 s from the others
    assert ranking.first.useful == pytest.approx(160 + 3 * 1600, rel=0.05)
    assert synchronous.useful == pytest.approx(4 * 160, rel=0.05)


def test_a_target_ranks_by_the_time_to_it(tmp_path: Path) -> None:
    ranking = plan_cluster(TASK, SLOW_ONE, strategies=BOTH, until="loss=0.3", trials=3, seconds=60, keep=tmp_path / "k")
    assert {e.candidate.family for e in ranking.shown if e.trial is not None} == {*BOTH, "single_process"}
    families = [entry.candidate.family for entry in ranking.shown]
    assert families.index("downpour") < families.index("synchronous")
    assert ranking.first.reached_s is not None
    assert "loss 0.3 in" in reason(ranking)
    assert len(list((tmp_path / "k").glob("*/run.sqlite"))) == 3


def test_one_process_is_in_every_ranking_as_fast_as_it_was_measured() -> None:
    """Where exchanges cost more than they bring, the answer is to stay with one process."""
    code = Overhead(batch_s=30e-6, exchange_s=100e-6, serve_s=100e-6, lease_s=300e-6)
    machine = MachineKind(name="box", cores=2, step_s=100e-6, single_s=200e-6, overhead=code)
    ranking = plan_cluster(TASK, Cluster(machines=(machine,)), strategies=BOTH, budget=3)
    alone = ranking.first
    assert (str(alone.candidate), alone.candidate.recipe.alone) == ("single_process", True)
    assert alone.useful == pytest.approx(16 / 200e-6, rel=0.01)
    assert alone.speed.bytes_per_second == 0
    assert "Stay with one process: single_process trains 80,000 examples/s, more than any with" in reason(ranking)
    assert "1 alone" in text(ranking)
    failing = Cluster(machines=(machine,), failures={"replica": FailureLaw(every_s=60, repair_s=30)})
    (entry,) = [e for e in plan_cluster(TASK, failing, strategies=BOTH).entries if e.candidate.recipe.alone]
    assert entry.survival.left == pytest.approx(0.5), "it is gone for half a minute, and loses as much each time"


def test_long_inner_loops_are_as_fast_in_short() -> None:
    """50 batches between exchanges are simulated as fewer, longer ones: against all of them, one by one."""
    strategy = squall.Averaging(replicas=4, every=50, optimizer=SGD)
    speed = speed_of(Candidate("averaging", strategy), TASK(), SLOW_ONE, 0)
    whole = simulate(
        TASK, strategy, SLOW_ONE, gradients="none", steps=4 * 50 * 10, settings=Settings(snapshot_every_s=None)
    )  # fmt: skip
    assert speed.examples_per_second == pytest.approx(whole.examples_per_second, rel=0.05)
    assert speed.idle == pytest.approx(whole.idle, abs=0.05)


@pytest.mark.parametrize("strategy", [squall.Downpour(replicas=4), squall.Synchronous(replicas=4)])
def test_charged_failures_agree_with_simulated_ones(strategy: squall.Strategy) -> None:
    """Replicas and the shard fail, and the machine goes away that the shard and the coordinator are on."""
    worker, server = (MachineKind(name=name, count=count, step_s=1.0, roles=roles) for name, count, roles in
                      (("worker", 4, ("replica",)), ("server", 1, ("shard", "coordinator", "evaluator"))))  # fmt: skip
    calm = Cluster(machines=(worker, server))
    failing = dataclasses.replace(
        calm, failures={"replica": FailureLaw(every_s=120, repair_s=20), "shard": FailureLaw(every_s=400, repair_s=40)},
        preemptions=(Preemption(at_s=500, machine="server", count=1, for_s=20, every_s=650),),
    )  # fmt: skip
    speed = speed_of(Candidate("", strategy), TASK(), calm, 0)
    forecast = simulate(TASK, strategy, failing, gradients="none", steps=12_000)
    charged = survival_of(strategy.recipe(), failing, speed.round_s).left
    assert forecast.restarts > 3
    assert charged == pytest.approx(forecast.examples_per_second / speed.examples_per_second, abs=0.06)


def test_an_interrupt_leaves_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def interrupted(*arguments: object) -> object:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(arguments)
        return speed_of(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(planner, "speed_of", interrupted)
    ranking = plan_cluster(TASK, SLOW_ONE, strategies=BOTH)
    assert ranking.interrupted
    assert len(ranking.entries) == 2
    assert "Interrupted" in text(ranking)


def test_an_interrupt_in_a_trial_ends_all_of_them_and_that_one_counts_as_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def interrupted(*arguments: Any, **options: Any) -> Forecast:
        tried.append(options["run_dir"])
        if len(tried) == 2:
            sent.append(False)
        return simulate(*arguments, **options)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if sent == [False] and signal.getsignal(signal.SIGINT) is not before:  # the simulation has begun
            sent[0] = True
            signal.raise_signal(signal.SIGINT)
        return mean_square(model, batch)

    sent: list[bool] = []
    before = signal.getsignal(signal.SIGINT)
    task = regression(examples=640, validate=numbers(64), loss=loss)
    monkeypatch.setattr(planner, "simulate", interrupted)
    ranking = plan_cluster(task, SLOW_ONE, strategies=BOTH, until="loss=0.3", trials=2, seconds=60)
    assert ranking.interrupted
    assert len(tried) == 2
    assert [e.trial.status for e in ranking.entries if e.trial is not None] == ["finished"]
    assert not any(e.failed for e in ranking.entries)


def test_a_directory_for_the_trials_is_refused_before_the_first_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "speed_of", None)
    (tmp_path / "older").touch()
    with pytest.raises(ValueError, match="exists already"):
        plan_cluster(TASK, SLOW_ONE, strategies=BOTH, until="loss=0.3", keep=tmp_path)


def test_a_cluster_without_room_is_refused_before_the_task_is_built() -> None:
    def task() -> squall.Task:
        raise AssertionError("the task is built")

    nowhere = Cluster(machines=(MachineKind(name="m", cores=4, roles=("replica", "coordinator", "evaluator")),))
    with pytest.raises(ValueError, match="no machine of the cluster may have a shard"):
        plan_cluster(task, nowhere, strategies=BOTH)


def test_the_picture_is_a_whole_file_with_every_name(tmp_path: Path) -> None:
    entries = [entry(DOWNPOUR, reached_s=2), entry(SYNCHRONOUS, reached_s=0), entry(DILOCO, 900)]
    for target in (("accuracy", 0.97), None):
        if target is None:
            entries = [dataclasses.replace(e, trial=None) for e in entries]
        page = write_picture(ranked(entries, target, 9), tmp_path / "plan.svg")
        picture = (tmp_path / "plan.svg").read_text()
        words = " ".join(ElementTree.fromstring(picture).itertext())
        for name in ("downpour", "synchronous", "diloco", "8 + 1", "replicas"):
            assert name in words
        assert "http" not in picture.replace("http://www.w3.org/", "")
        assert reason(ranked(entries, target, 9)) in page.read_text()


def test_the_table_fits_80_columns() -> None:
    entries = [entry(DOWNPOUR, 1234567, name="downpour, push every 100", reached_s=2), entry(SYNCHRONOUS, reached_s=0)]
    lines = text(ranked(entries, ("accuracy", 0.97), 9)).splitlines()
    assert max(map(len, lines)) <= 80


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(FILE)
    (tmp_path / "cluster.toml").write_text(SLOW_ONE.to_toml())
    return tmp_path


def test_the_command_prints_a_ranking_and_draws_it(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "job.py", "--cluster", "cluster.toml", "--budget", "3"]
    assert main([*command, "--strategies", "synchronous,bounded_delay:max_delay=2"]) == 0
    output = capsys.readouterr().out
    assert "Stay with one process: single_process trains 1,600 examples/s" in output
    assert "bounded_delay:max_delay" in output
    assert "to train  squall train job.py --strategy" in output
    assert (files / "plan.svg").exists()
    assert main([*command, "--strategies", "downpour", "--force", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["budget"] == 3
    assert all(e["settings"].get("replicas", 0) + e["settings"].get("shards", 1) <= 3 for e in document["ranking"])
    assert main(command) == 1
    assert "plan.svg exists already: write over it with --force" in capsys.readouterr().err
    (files / "lab").mkdir()
    (files / "cluster.toml").rename(files / "lab" / "other.toml")
    assert main(["plan", "job.py", "--cluster", "lab/other.toml", "--budget", "2", "--strategies", "downpour"]) == 0
    assert {path.name for path in (files / "lab").iterdir()} == {"other.toml", "plan.svg", "plan.html"}


def test_a_strategy_for_which_there_is_no_room_is_named_with_the_reason() -> None:
    ranking = plan_cluster(TASK, SLOW_ONE, strategies=BOTH, budget=2)
    assert {entry.candidate.family for entry in ranking.entries} == {"single_process", "synchronous"}
    assert "Not ranked: downpour. A budget of 2 has room for one replica, which is plain training" in text(ranking, 200)
    assert "Not ranked" not in reason(plan_cluster(TASK, SLOW_ONE, strategies=BOTH, budget=3))


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("plan", ("plan.svg", "plan.html")), ("measure", ("cluster.toml", "cluster.steps.txt")),
        ("compare", ("compare.html", "compare.png")),
    ],
)  # fmt: skip
def test_help_names_the_files_that_a_command_writes(
    command: str, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budget", "1"], "budget is 1: it must be at least 2"),
        (["--strategies", "newton"], "there is no strategy 'newton': use"),
        (["--strategies", "sandblaster"], "sandblaster, which decides by what it computes"),
        (["--strategies", "downpour:replicas=4"], "replicas and shards are swept, use --budget"),
        (["--strategies", "downpour:speed=4"], "write field=value"),
        (["--until", "beauty=1"], "until names the metric 'beauty', but the task has loss"),
        (["--seconds", "5"], "give until too"),
        (["--keep", "trials"], "give until too"),
        (["--trials", "0"], "trials is 0"),
        (["--output", "plan.png"], "does not end in .svg"),
        (["--cluster", "none.toml"], "none.toml is no file: write one with `squall measure job.py`"),
    ],
)
def test_mistakes_are_refused_with_a_remedy(
    files: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["plan", "job.py", "--cluster", "cluster.toml", *flags]) == 1
    assert message in capsys.readouterr().err
