"""`squall export`: what it prints, for people and programs, and its exit status."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import squall
from squall.cli import main
from squall.export.formats import FORMATS
from squall.export.verdict import Measured, decide
from squall.run import Run
from tests.export.models import classes, features


def test_it_prints_what_was_written(inline: Callable[..., Run], tmp_path: Path, capsys: Any) -> None:
    run, file = inline(partial(classes, features()), squall.SingleProcess()), tmp_path / "m.pt2"
    assert main(["export", str(run.directory), str(file), "--snapshot", "1"]) == 0
    shown = capsys.readouterr().out
    for words in ("torch.export", "float32[batch, 12]", "of the largest output", str(file)):
        assert words in shown
    assert main(["export", str(run.directory), str(file)]) == 1
    assert "exists already: write over it with --overwrite" in capsys.readouterr().err
    assert main(["export", str(run.directory), str(file), "--overwrite", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    size = file.stat().st_size
    known = {"file": str(file), "format": "torch.export", "bytes": size, "inputs": ["float32[batch, 12]"]}
    assert found == {**known, "difference": found["difference"], "verdict": None}


def test_sigterm_ends_it_as_ctrl_c_does(
    inline: Callable[..., Run], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    def told(*of: Any) -> float:
        assert list(tmp_path.glob(".export-*"))
        signal.raise_signal(signal.SIGTERM)
        return 0.0

    monkeypatch.setattr("squall.export.compare.difference", told)
    run, before = inline(partial(classes, features()), squall.SingleProcess()), signal.getsignal(signal.SIGTERM)
    there = set(tmp_path.iterdir())
    assert main(["export", str(run.directory), str(tmp_path / "m.pt2")]) == 130
    assert capsys.readouterr().err == "squall: interrupted\n"
    assert set(tmp_path.iterdir()) == there
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_refused_verdict_is_shown_and_nothing_is_written(
    inline: Callable[..., Run], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    asked = []

    def judged(task: squall.Task, file: Path, like: Any, tolerance: float) -> Any:
        asked.append(tolerance)
        before, after = (Measured(n, {"accuracy": 0.9}, {1: s, 64: s}, 8) for n, s in (("float32", 0.1), ("x", 0.2)))
        return decide(before, [after], tolerance)

    monkeypatch.setattr("squall.export.exporting.quantized", judged)
    monkeypatch.setattr("squall.export.exporting.format_of", lambda path: FORMATS[".safetensors"])  # a quick one
    run, file = inline(partial(classes, features()), squall.SingleProcess()), tmp_path / "m.onnx"
    arguments = ["export", str(run.directory), str(file), "--int8"]
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "x is refused: it is 0.50 x as fast at batch 1 and 0.50 x as fast at batch 64" in shown
    assert main([*arguments, "--json", "--tolerance", "0.02"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] is None
    assert found["verdict"]["accepted"] is None
    assert found["verdict"]["before"]["latency_s"] == {"1": 0.1, "64": 0.1}
    assert found["verdict"]["tried"][0]["throughput"] == {"1": 5.0, "64": 320.0}
    assert asked == [0.005, 0.02]
    assert not file.exists()
    assert main(["export", str(run.directory), str(file), "--tolerance", "0.02"]) == 1
    assert "--tolerance is for --int8" in capsys.readouterr().err
