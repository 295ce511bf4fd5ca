"""`squall report` and `squall doctor`, for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import squall
from squall.cli import main
from squall.doctor import checkup
from squall.run import Run
from tests.tasks import regression


def test_report_prints_an_object(inline: Callable[..., Run], capsys: Any) -> None:
    run = inline(regression(), squall.Downpour(replicas=2), epochs=2)
    path = str(run.directory)
    assert main(["report", path, "--json"]) == 0
    page = str(run.directory / "report.html")
    found = {**run.summary().to_json_dict(), "run_directory": path, "report": page}
    assert json.loads(capsys.readouterr().out) == found
    assert Path(page).exists()
    assert main(["report", path, "--json", "--audit"]) == 0
    places: dict[str, object] = {"missed": [], "repeated": [], "skipped": []}
    part = {"first": 0, "last": 1, "examples": 90, "trained": 90, "finished": True, **places}
    found = {"complete": True, "absent": 0, "batches": "", "parts": [part]}
    assert json.loads(capsys.readouterr().out) == found


def test_doctor_prints_an_object(capsys: Any) -> None:
    status = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["name"] for finding in found] == [finding.name for finding in checkup()]
    assert all(set(finding) == {"name", "ok", "found", "remedy"} for finding in found)
    assert status == any(finding["ok"] is False for finding in found)
