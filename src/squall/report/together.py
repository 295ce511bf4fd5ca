"""Any runs on one page, as `squall compare` shows those that it has made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from squall.report.comparison import ComparedRun, Comparison

PAGE = "reports.html"  # beside the first run


def write_together(run_dirs: Sequence[str | Path], page: str | Path | None = None) -> Comparison:
    """Write one page of several runs, whole or not, of one task or of several, and return what is on it.

    The time to a target is told where all of them were trained `until` the same.

    Raises:
        ValueError: one of the directories holds no run, or is there twice, or the page's directory is not there.
        RecordError: a record cannot be read.
    """
    folders = [Path(run_dir).resolve() for run_dir in run_dirs]
    for folder in folders:
        if not (folder / "run.sqlite").exists():
            raise ValueError(f"{folder} holds no run: there is no run.sqlite in it")
        if folders.count(folder) > 1:
            raise ValueError(f"{folder} is named twice: leave one out")
    trials = [ComparedRun(name, 0, folder) for name, folder in zip(_names(folders), folders)]
    targets = {tuple(trial.plan.get("until") or ()) for trial in trials}
    target = targets.pop() if len(targets) == 1 else ()
    there = Path(page) if page is not None else folders[0].parent / PAGE
    if not there.parent.is_dir():
        raise ValueError(f"{there.parent} is no directory: make it, or choose another place for the page")
    found = Comparison(there, trials, (str(target[0]), float(target[1])) if target else None, None)
    found.write_page()
    return found


def _names(folders: Sequence[Path]) -> list[str]:
    """Paths from the folder that all of them have in common: mostly their own names."""
    common = os.path.commonpath([folder.parent for folder in folders])
    return [os.path.relpath(folder, common) for folder in folders]
