"""`squall simulate FILE --cluster ...` as a user types it."""

import json
from pathlib import Path

import pytest

from squall.cli import main

TASK = """
import torch, squall
from torch.utils.data import TensorDataset

points = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
data = TensorDataset(points, points.sum(1, keepdim=True))
strategy = squall.Synchronous(replicas=2)
epochs = 3


def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def task():
    return squall.Task(model=torch.nn.Linear(3, 1), loss=loss, train=data, validate=data, batch_size=8)
"""
CLUSTER = """
[[machines]]
name = "box"
count = 4
step = "10 ms"

[links.between]
latency = "1 ms"
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    return ["mine.py", "--cluster", "cluster.toml"]


def told(files: list[str], *flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["simulate", *files, *flags, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_file_decides_what_no_flag_does(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = told(files, "--gradients", "none", capsys=capsys)
    assert (found["strategy"], found["replicas"], found["examples"]) == ("synchronous", 2, 3 * 64)
    assert found["run_directory"] is None
    assert not Path("runs").exists()


def test_flags_are_those_of_train(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--strategy", "downpour", "--replicas", "3", "--steps", "20", "--lr", "0.1", "--run-dir", "kept")
    found = told(files, *flags, capsys=capsys)
    assert (found["strategy"], found["replicas"], found["examples"]) == ("downpour", 3, 20 * 8)
    assert found["run_directory"] == "kept"
    assert Path("kept/report.html").exists()
    metrics = found["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["loss"] < 3.0


def test_parts_are_the_clusters_or_the_tasks(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    roomy = CLUSTER.replace("count = 4", "count = 4\ncores = 2")
    Path("cluster.toml").write_text(f"{roomy}\n[parts]\nshares = [0.5, 0.5]\nmicrobatches = 4\npassed = [0]\n")
    whole, parts = (
        told(files, "--gradients", "none", "--parts", n, "--steps", "200", capsys=capsys) for n in ("1", "2")
    )
    assert (whole["parts"], parts["parts"]) == (1, 2)
    assert isinstance(whole["training_s"], float)
    assert isinstance(parts["training_s"], float)
    assert parts["training_s"] < whole["training_s"]


def test_people_get_a_table_and_the_report(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *files]) == 0
    out = capsys.readouterr().out
    for word in ("synchronous, 2 replicas, 1 shard\n", "virtual time", "replicas wait", "goodput", "report.html"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["mine.py"], "`squall measure mine.py` writes one"),
        (["--cluster", "cluster.toml"], "name the file"),
        (["mine"], "mine is no Python file"),
        (["mine.py", "--cluster", "none.toml"], "none.toml"),
        (["mine.py", "--cluster", "wrong.toml"], "wrong.toml, line 3: "),
        (["mine.py", "--cluster", "cluster.toml", "--max-delay", "3"], "Synchronous has no --max-delay"),
        (["mine.py", "--cluster", "cluster.toml", "--parts", "2"], "give Task(split=...)"),
        (["mine.py", "--cluster", "cluster.toml", "--parts", "0"], "parts is 0"),
        (["mine.py", "--cluster", "cluster.toml", "--spread-parts"], "give --parts as well"),
        (["mine.py", "--cluster", "cluster.toml", "--gradients", "none", "--until", "loss=0.1"], "gradients='real'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_the_remedy(
    files: list[str], arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wrong.toml").write_text("[[machines]]\nname = 'a'\nstep = 10\n")
    assert main(["simulate", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("squall: error: ")
    assert text in error
    assert not Path("runs").exists()


def test_help_tells_of_both_uses(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, flags in ((["--help"], ("--trace",)), (["mine.py", "--help"], ("--cluster", "--gradients", "--lr"))):
        with pytest.raises(SystemExit) as end:
            main(["simulate", *arguments])
        assert end.value.code == 0
        out = capsys.readouterr().out
        assert all(flag in out for flag in flags)
