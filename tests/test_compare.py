"""`squall compare`: several strategies on one task, one page."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import squall
from squall.cli import main
from squall.compare import compare
from squall.task import TaskFunction
from tests import deep
from tests.tasks import INLINE, mean_square, numbers, regression

SGD = partial(torch.optim.SGD, lr=0.05)


def measured() -> TaskFunction:
    def closeness(model: Any, batch: Any) -> torch.Tensor:
        close: torch.Tensor = ((model(batch[0]) - batch[1]) ** 2 < 0.25).float().squeeze(1)
        return close

    return regression(validate=numbers(64), metrics={"closeness": closeness}, loss=mean_square)


@pytest.fixture
def strategies() -> dict[str, squall.Strategy]:
    return {
        "single_process": squall.SingleProcess(optimizer=SGD),
        "synchronous": squall.Synchronous(optimizer=SGD),
        "averaging:every=4": squall.Averaging(every=4, optimizer=SGD),
    }


def test_runs_are_compared_in_numbers_a_page_and_a_picture(
    strategies: dict[str, squall.Strategy], run_dir: Path, without_report: None
) -> None:
    found = compare(measured(), strategies, epochs=4, until="closeness=0.4", seeds=2, run_dir=run_dir, settings=INLINE)
    (run_dir / "averaging_every=4-seed-1" / "report.html").touch()
    found.write_page()
    document = json.loads(json.dumps(found.to_json_dict()))
    assert list(document["strategies"]) == list(strategies)
    for figures in document["strategies"].values():
        assert [run["seed"] for run in figures["runs"]] == [0, 1]
        assert figures["metrics"].keys() == {"loss", "closeness"}
        assert all(run["status"] == "finished" and run["examples"] == 4 * 90 for run in figures["runs"])
    assert document["strategies"]["single_process"]["exchanged_bytes"] == 0
    assert document["strategies"]["averaging:every=4"]["exchanged_bytes"] > 0
    table = str(found)
    assert all(name in table for name in strategies)
    page = found.page.read_text()
    assert all(f"<td>{name}</td>" in page for name in strategies)
    assert "http" not in page.replace("http://www.w3.org", ""), "nothing is fetched from a network"
    assert page.count("<svg") >= 6
    assert '<a href="averaging_every%3D4-seed-1/report.html">averaging:every=4, seed 1</a>' in page
    assert found.picture.read_bytes().startswith(b"\x89PNG")
    ElementTree.fromstring(
        page.partition("\n")[2]
        .replace('<meta charset="utf-8">', "")
        .replace('<meta name="viewport" content="width=device-width, initial-scale=1">', "")
        .replace("&nbsp;", " ")
    )


def test_a_target_that_is_not_reached_everywhere_is_said(
    strategies: dict[str, squall.Strategy], run_dir: Path, without_report: None
) -> None:
    found = compare(measured(), strategies, epochs=1, until="closeness=1.0", run_dir=run_dir, settings=INLINE)
    assert str(found).count("not reached (0 of 1)") == len(strategies)
    assert found.to_json_dict()["strategies"]["synchronous"]["seconds_to_target"] is None


@deep.only
def test_all_have_the_same_cores_and_a_single_process_is_not_made_slow_by_threads(
    run_dir: Path, without_report: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread more waits for the other here as long as on a machine that others keep busy."""
    strategies = {"alone": squall.SingleProcess(optimizer=SGD), "four": squall.Downpour(replicas=4, optimizer=SGD)}
    strategies["two"] = squall.Downpour(replicas=2, optimizer=SGD)
    monkeypatch.setattr("squall.compare.own_step_s", lambda plan, task, layout: {1: 0.001, 4: 0.1}[plan.threads])
    found = compare(measured(), strategies, epochs=1, run_dir=run_dir, settings=INLINE)
    document = found.to_json_dict()
    shapes = {name: (figures["replicas"], figures["threads"]) for name, figures in document["strategies"].items()}
    assert (document["cores"], shapes) == (4, {"alone": (1, 1), "four": (4, 1), "two": (2, 2)})
    for where in (str(found), found.page.read_text()):
        assert "Each had the same 4 cores, as replicas x threads. alone has one thread" in where
        assert "2 x 2" in where
    monkeypatch.setattr("squall.compare.own_step_s", lambda plan, task, layout: {1: 0.1, 4: 0.03}[plan.threads])
    found = compare(measured(), strategies, epochs=1, run_dir=run_dir.with_name("faster"), settings=INLINE)
    assert found.to_json_dict()["strategies"]["alone"]["threads"] == 4


def test_a_column_without_figures_is_left_out_and_one_evaluation_is_a_point(
    run_dir: Path, without_report: None
) -> None:
    strategies = {"single_process": squall.SingleProcess(optimizer=SGD)}
    found = compare(measured(), strategies, epochs=1, run_dir=run_dir, settings=INLINE)
    assert found.cells()[0] == ["strategy", "optimizer", "replicas x threads", "result", "examples/s"]
    page = found.page.read_text()
    assert "mean staleness" not in page
    assert "<use " in page, "the marker of a curve's only point"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "seeds is 0: it must be at least 1"),
        ({"strategies": {}}, "name at least one strategy"),
        ({"strategies": {"s": squall.Synchronous(replicas=0)}}, "replicas is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"epochs": 1, "until": "acuracy=0.9"}, "until names the metric 'acuracy'"),
        ({"strategies": {"a": squall.Synchronous(), "b": squall.DiLoCo(outer_lr=-1.0)}}, "outer_lr is -1.0"),
        ({"strategies": {"a": squall.Synchronous(shards=10_000)}}, "10000 shards for"),
        ({"strategies": {"a:b": squall.Synchronous(), "a_b": squall.Synchronous()}}, "two names of strategies"),
    ],
)
def test_what_cannot_be_is_refused_before_a_directory_is_made(
    options: dict[str, Any], message: str, strategies: dict[str, squall.Strategy], run_dir: Path
) -> None:
    options = {"strategies": strategies, "run_dir": run_dir, "settings": INLINE} | options
    with pytest.raises(ValueError, match=message):
        compare(measured(), **options)
    assert not run_dir.exists()


@deep.only
def test_one_optimizer_for_all_and_it_stands_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, without_report: None
) -> None:
    file = tmp_path / "my_task.py"
    file.write_text("from tests.tasks import regression\ntask = regression()\n")
    monkeypatch.chdir(tmp_path)
    names = "single_process,averaging:every=4,sandblaster:batch=full"
    flags = ["--epochs", "1", "--launcher", "inline", "--optimizer", "adagrad", "--lr", "0.03", "--run-dir", "r"]
    assert main(["compare", str(file), "--strategies", names, "--quiet", "--tensorboard", *flags]) == 0
    assert len(list(tmp_path.glob("r/*/tensorboard"))) == 3, "of each run, so that TensorBoard shows all of r/"
    text = capsys.readouterr().out
    assert text.count("Adagrad, lr 0.03") == 2
    assert "L-BFGS" in text
    assert "<td>Adagrad, lr 0.03</td>" in (tmp_path / "r" / "compare.html").read_text()


def test_a_slow_replica_does_less_where_nobody_waits(run_dir: Path, without_report: None) -> None:
    settings = squall.Settings(launcher="inline", threads=1, progress=False, slow=0.1)
    task = regression(examples=960)
    run = squall.fit(task, squall.Downpour(replicas=3, optimizer=SGD), epochs=2, run_dir=run_dir, settings=settings)
    shares = run.summary().shares
    assert shares[2] < 0.2 < shares[0]
