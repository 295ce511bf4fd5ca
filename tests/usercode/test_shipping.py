"""The user's functions reach other processes by value: a script needs no main guard, nor to be importable."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

import squall
from squall.usercode.shipping import ship
from tests import deep


def started(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])


def test_what_is_shipped_comes_back() -> None:
    here = 5
    code = cloudpickle.loads(ship({"task": lambda: here + 1, "module": squall}))
    assert code["task"]() == 6
    assert code["module"] is squall


def test_what_holds_a_lock_is_refused_with_the_remedy() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"lock.*inside the task function"):
        ship({"task": lambda: lock})


SCRIPT = """
import torch, squall
from tests.tasks import numbers
class Net(torch.nn.Linear): pass
def loss(model, batch): return (model(batch[0]) - batch[1]).square().mean()
def train(width):
    def task(): return squall.Task(model=Net(width, 1), loss=loss, train=numbers(60), batch_size=8)
    return squall.fit(task, squall.Downpour(), run_dir={directory!r}, settings=squall.Settings(progress=False))
print(train(6).summary().examples, type(train).__name__)
"""


@deep.only
def test_functions_of_main_and_closures_are_shipped(tmp_path: Path) -> None:
    done = started("-c", SCRIPT.format(directory=str(tmp_path / "r")))
    assert done.stdout.split() == ["60", "function"], done.stderr


@deep.only
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys; sys.path.insert(0, '.')\n" + SCRIPT.format(directory=str(tmp_path / "r")))
    done = started(path)
    assert done.stdout.split() == ["60", "function"], done.stderr
