"""`squall report` and `squall doctor`, for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import squall
from squall.cli import main
from squall.doctor import checkup
from squall.record.rows import StateRow
from squall.record.writer import Record
from squall.run import Run
from tests.tasks import numbers, regression


def test_report_prints_an_object(inline: Callable[..., Run], capsys: Any) -> None:
    run = inline(regression(), squall.Downpour(replicas=2), epochs=2)
    path = str(run.directory)
    assert main(["report", path, "--json"]) == 0
    page = str(run.directory / "report.html")
    found = {**run.summary().to_json_dict(), "run_directory": path, "report": page}
    assert json.loads(capsys.readouterr().out) == found
    assert Path(page).exists()
    assert main(["report", path, "--json", "--audit"]) == 0
    places: dict[str, object] = {"missed": [], "repeated": [], "skipped": [], "quarantined": []}
    part = {"first": 0, "last": 1, "examples": 90, "trained": 90, "finished": True, **places}
    found = {"complete": True, "absent": 0, "batches": "", "parts": [part], "lost": []}
    assert json.loads(capsys.readouterr().out) == found


def test_several_runs_are_on_one_page(inline: Callable[..., Run], tmp_path: Path, capsys: Any) -> None:
    """Of different tasks and metrics, one without a record of anything and one that was never finished."""
    closeness = {"closeness": lambda model, batch: (model(batch[0]) - batch[1]).abs() < 0.5}
    first = inline(regression(validate=numbers(20), metrics=closeness), squall.Downpour(replicas=2), epochs=2)
    other = inline(regression(validate=numbers(20)), squall.Averaging(replicas=3), epochs=1)
    empty, unfinished = tmp_path / "empty", tmp_path / "deep" / "unfinished"
    write_record(empty)
    write_record(unfinished, StateRow("status", "running"), StateRow("strategy", "diloco"))
    paths = [str(path) for path in (first.directory, other.directory, empty, unfinished)]
    assert main(["report", paths[0]]) == 0
    capsys.readouterr()
    assert main(["report", *paths]) == 0
    page = tmp_path / "reports.html"
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    cells = [re.findall("<td>(.*?)</td>", line) for line in re.findall("<tr>(.*?)</tr>", text)[1:]]
    assert [row[:2] for row in cells] == [
        ["run-1", "downpour"], ["run-2", "averaging"], ["empty", "unknown"], ["deep/unfinished", "diloco"],
    ]  # fmt: skip
    assert [row[3] for row in cells] == ["-", "-", "unknown", "running"]
    assert cells[0][5].startswith("closeness ")
    assert cells[1][5].startswith("loss ")
    assert "empty: the record is empty: the run ended before it began to train." in text
    assert "deep/unfinished: the run had not finished when this page was written; its status was: running." in text
    assert re.findall('<a href="(.*?)">(.*?)</a>', text) == [("run-1/report.html", "run-1")], "the others have none"
    assert "same" not in text.partition("<h2>")[0].partition("<body>")[2], "they may have had any number of cores"
    assert main(["report", *paths[:2], "--out", str(tmp_path / "page.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["strategy"], each["report"]) for each in found] == [
        ("downpour", str(tmp_path / "page.html")), ("averaging", str(tmp_path / "page.html")),
    ]  # fmt: skip
    assert (tmp_path / "page.html").exists()
    (tmp_path / "a: b").mkdir()
    assert main(["report", *paths[:2], "--out", str(tmp_path / "a: b" / "page.html")]) == 0
    assert '<a href="../run-1/report.html">' in (tmp_path / "a: b" / "page.html").read_text()
    capsys.readouterr()
    assert main(["report", *paths[:2], "--audit"]) == 0
    proofs = capsys.readouterr().out
    assert [f"{path}:\n" in proofs for path in paths[:2]] == [True, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["run", "run"], "is named twice"),
        (["run", "nothing"], "nothing holds no run"),
        (["run", "--out", "page.html"], "--out is for the page of several runs"),
        (["run", "--audit", "--tensorboard"], "--audit writes nothing"),
        (["run", "other", "--out", "nowhere/page.html"], "nowhere is no directory"),
    ],
)
def test_what_no_page_can_be_made_of_is_refused(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run", "other"):
        write_record(Path(name))
    assert main(["report", *flags]) == 1
    assert message in capsys.readouterr().err


def write_record(folder: Path, *rows: StateRow) -> None:
    folder.mkdir(parents=True)
    with closing(Record(folder / "run.sqlite")) as record:
        for row in rows:
            record.add(row)


def test_what_tensorboard_reads_is_written_of_any_run(inline: Callable[..., Run], capsys: Any) -> None:
    run = inline(regression(), squall.Downpour(), epochs=1)
    assert main(["report", str(run.directory), "--tensorboard", "--json"]) == 0
    folder = run.directory / "tensorboard"
    assert json.loads(capsys.readouterr().out)["tensorboard"] == str(folder)
    assert len(list(folder.iterdir())) == 2, "the graph and plan, and the curves"


def test_doctor_prints_an_object(capsys: Any) -> None:
    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["name"] for finding in found] == [finding.name for finding in checkup()]
    assert all(set(finding) == {"name", "ok", "found", "remedy"} for finding in found)
    assert status == any(finding["ok"] is False for finding in found)
