"""A run that goes on reads its task again, says what has changed, and shows the lines of the code that runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import squall
from squall.cli import main
from squall.run import Run
from squall.usercode.kept import load_code
from tests import deep
from tests.tasks import numbers, regression
from tests.warm import squall as squall_process

Fit = Callable[..., Run]

HELPER = """
def check(index):
    if index == 100:
        raise ValueError("item 100 is damaged")
"""
FILE = """
import torch, squall
from beside import check
from tests.tasks import mean_square, numbers, plain

class Damaged(torch.utils.data.Dataset):
    def __len__(self): return 160
    def __getitem__(self, index):
        check(index); assert index != 120, "index 120"
        return numbers(160)[index]

def task():
    return squall.Task(model=plain(), loss=mean_square, train=Damaged(), batch_size=8)
"""
MENDED = "# a remark above\n" + FILE.replace("index != 120", "index < 160")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_report: None) -> Path:
    """A folder with a task and a module beside it; the working directory is another, and no path is left behind."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "my" / "beside.py").write_text(HELPER)
    (tmp_path / "my" / "my_task.py").write_text(FILE)
    return tmp_path / "my"


def forget() -> None:
    """As in a new process."""
    sys.modules.pop("beside", None)
    sys.modules.pop("my_task", None)


def raised(capsys: Any, *arguments: str) -> str:
    """What the command that fails writes."""
    forget()
    assert main([*arguments]) == 1
    return capsys.readouterr().err


def test_a_mended_file_is_read_again_and_the_stored_code_keeps_its_own_lines(files: Path, capsys: Any) -> None:
    start = ("train", str(files / "my_task.py"), "--launcher", "inline", "--threads", "1", "--quiet", "--run-dir", "r")
    assert "item 100 is damaged" in raised(capsys, *start)
    (files / "my_task.py").write_text(MENDED)
    (files / "beside.py").write_text(HELPER.replace("index == 100", "index == 1000"))

    told = raised(capsys, "resume", "r", "--as-it-was")
    assert 'check(index); assert index != 120, "index 120"' in told, "the line as it was, though the file is another"
    changed = f"squall: {files / 'my_task.py'} has changed since the run began: 2 lines, from line 1 on"
    assert f"{changed}; the run goes on with it as it was\n" in told
    assert f"squall: {files / 'beside.py'} has changed since the run began: 1 line, from line 3 on\n" in told

    forget()
    assert main(["resume", "r"]) == 0
    told = capsys.readouterr()
    assert f"{changed}\n" in told.err
    assert "beside.py" not in told.err, "it was so when the run was started last"
    assert "finished" in told.out

    forget()
    assert main(["resume", "r", "--epochs", "2"]) == 0
    assert "has changed" not in capsys.readouterr().err

    (files / "my_task.py").unlink()
    assert main(["resume", "r", "--epochs", "3"]) == 1
    assert "my_task.py cannot be read again: go on with the code that was kept, by --as-it-was" in (
        capsys.readouterr().err
    )
    forget()
    assert main(["resume", "r", "--epochs", "3", "--as-it-was"]) == 0
    forget()
    (files / "moved.py").write_text(MENDED)
    assert main(["resume", "r", "--epochs", "4", "--task", str(files / "moved.py")]) == 0
    assert load_code(Path("r")).get("file") == f"{files / 'moved.py'}:task"

    (files / "beside.py").unlink()
    missing = raised(capsys, "resume", "r", "--epochs", "5", "--as-it-was")
    assert "code.pickle needs the module 'beside', which is not found here: put its folder into PYTHONPATH" in missing


def test_a_module_that_lost_what_the_stored_task_needs_does_not_matter_to_the_mended_file(
    files: Path, capsys: Any
) -> None:
    start = ("train", str(files / "my_task.py"), "--launcher", "inline", "--threads", "1", "--quiet", "--run-dir", "r")
    assert "item 100 is damaged" in raised(capsys, *start)
    (files / "beside.py").write_text("")
    (files / "my_task.py").write_text(
        FILE.replace("from beside import check", "").replace("check(index); assert index != 120", "assert index < 160")
    )
    forget()
    assert main(["resume", "r"]) == 0


def test_a_function_given_to_fit_goes_on_as_it_was_and_another_takes_its_place(inline: Fit, run_dir: Path) -> None:
    seen: list[str] = []

    def task(mended: bool = False) -> squall.Task:
        seen.append("mended" if mended else "as it was")
        return regression(train=numbers(90))()

    inline(task, squall.Downpour(), run_dir=run_dir)
    before = len(seen)
    squall.resume(run_dir, epochs=2)
    assert len(seen) == before, "the stored function has its own list"
    squall.resume(run_dir, epochs=3, task=lambda: task(mended=True))
    assert set(seen[before:]) == {"mended"}
    assert Run(run_dir).summary().examples == 3 * 90
    with pytest.raises(ValueError, match="leave one out"):
        squall.resume(run_dir, task=task, as_it_was=True)


PROGRAM = """
import pathlib, sys
sys.path.insert(0, ".")
import squall
from setproctitle import getproctitle
from tests.tasks import LOCAL, mean_square, numbers, plain

def loss(model, batch):
    if getproctitle().startswith("squall replica"):
        file = pathlib.Path(FILE)
        file.write_text("# edited" + chr(10) + file.read_text())  # whoever looks there now finds another line
        raise KeyError("of the function")  # this very line
    return mean_square(model, batch)

FILE = __file__

def task():
    return squall.Task(model=plain(), loss=loss, train=numbers(60), batch_size=8)

squall.fit(task, squall.Downpour(replicas=1), settings=LOCAL, run_dir=sys.argv[1])
"""
SCRIPT = """
import torch, squall
from tests.tasks import numbers
model = torch.nn.Linear(6, 1)
session = squall.join(model)
for number, batch in enumerate(session.batches(numbers(320), batch_size=8)):
    if number == 3: raise KeyError("in the loop")  # this very line
    session.step(model(batch[0]).square().mean().backward())
print("trained")
"""


@deep.only
def test_a_program_that_is_edited_while_it_trains_fails_with_the_lines_that_ran(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path), str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "# this very line" in done.stderr
    assert f"mend it, and go on from snapshot 1 with: squall.resume('{tmp_path / 'r'}', task=...)" in done.stderr


def test_a_mended_script_is_read_again_and_as_it_was_fails_as_it_did(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = squall_process("run", "--replicas", "1", "--run-dir", tmp_path / "r", script)
    remedy = f"with: squall resume {tmp_path / 'r'} (which reads {script} again)"
    assert (done.returncode, remedy in done.stderr) == (1, True), done.stderr
    script.write_text("# mended" + SCRIPT.replace("number == 3", "number < 0"))

    done = squall_process("resume", tmp_path / "r", "--as-it-was")
    assert (done.returncode, "# this very line" in done.stderr) == (1, True), done.stderr
    assert "script.py has changed since the run began: 2 lines, from line 1 on; the run goes on with it" in done.stderr

    done = squall_process("resume", tmp_path / "r")
    assert (done.returncode, done.stdout.splitlines().count("trained")) == (0, 1), done.stderr
    assert "script.py has changed since the run began: 2 lines, from line 1 on\n" in done.stderr
