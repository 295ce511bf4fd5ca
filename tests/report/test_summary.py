import json
import math
from contextlib import closing
from pathlib import Path

from squall.record.rows import ActivityRow, MetricRow
from squall.report import Reader, Summary, summarize
from tests.report.conftest import state, work, write


def summary(path: Path) -> Summary:
    with closing(Reader(path)) as reader:
        return summarize(reader)


def test_a_finished_run(run_dir: Path) -> None:
    assert summary(run_dir / "run.sqlite") == Summary(
        strategy="downpour",
        optimizer="Adagrad, lr 0.02",
        status="finished",
        ended="data",
        reason="all data is trained",
        diverged=None,
        metrics={"loss": 0.125, "accuracy": 0.875},
        extras={},
        first_step_s=1.5,
        training_s=10.0,
        examples=2000,
        examples_per_second=200.0,
        staleness_mean=0.75,
        staleness_max=3,
        updates=40,
        exchanged_bytes=20 * 800,
        shares={0: 0.75, 1: 0.25},
        deaths=1,
    )


def test_it_prints_as_a_plain_table(run_dir: Path) -> None:
    text = str(summary(run_dir / "run.sqlite"))
    lines = [line.strip().split("  ", 1) for line in text.splitlines() if line.strip()]
    assert {name: value.strip() for name, value in lines} == {
        "strategy": "downpour",
        "optimizer": "Adagrad, lr 0.02",
        "status": "finished: all data is trained",
        "loss": "0.125",
        "accuracy": "0.875",
        "training time": "10.0 s",
        "until the first step": "1.5 s",
        "examples": "2,000",
        "examples/s": "200",
        "updates": "40",
        "exchanged": "16 kB",
        "staleness": "0.75 mean, 3 max",
        "share of replica": "0: 75 %, 1: 25 %",
    }
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_copies_cost_is_said_where_there_are_such(tmp_path: Path) -> None:
    def row(node: str, seconds: float, copied_s: float) -> ActivityRow:
        return ActivityRow(seconds, 0, node, seconds, 0.0, 0.0, 0.0, copied_s, "", 0.0, 1, copied_s)

    rows = [row("shard-0.0", 3.0, 0.5), row("shard-1.2", 1.0, 0.0), row("coordinator-0.0", 2.0, 2.0)]
    path = write(tmp_path / "run.sqlite", [*state(copies=2, copied=3_000_000), *rows])
    found = summary(path)
    assert (found.copying, found.copied_bytes) == (0.125, 3_000_000)
    assert dict(found.lines())["copies"] == "shards waited 12.5 % of the time for theirs, 3 MB of pushes sent on"
    assert "copies" not in dict(summary(write(tmp_path / "alone.sqlite", [*state(copies=1), *rows])).lines())


def test_json_holds_no_number_that_json_cannot(tmp_path: Path) -> None:
    rows = [MetricRow(1.0, 0, 1, 1, "loss", math.nan), work(2.0, 3, 100)]
    values = summary(write(tmp_path / "run.sqlite", [*rows])).to_json_dict()
    assert json.loads(json.dumps(values, allow_nan=False))["metrics"] == {"loss": None}
    assert values["shares"] == {"3": 1.0}


def test_an_unfinished_run_tells_what_it_has_done(tmp_path: Path) -> None:
    rows = [*state(strategy="synchronous", status="running"), work(2.0, 0, 100)]
    found = summary(write(tmp_path / "run.sqlite", rows))
    assert (found.training_s, found.examples_per_second, found.first_step_s) == (2.0, 50.0, None)
    assert (found.staleness_mean, found.staleness_max, found.updates) == (None, None, None)
    assert "unknown" in str(found)


def test_an_empty_run(tmp_path: Path) -> None:
    found = summary(write(tmp_path / "run.sqlite", []))
    assert (found.strategy, found.examples, found.examples_per_second, found.shares) == ("unknown", 0, 0.0, {})
    assert str(found)
