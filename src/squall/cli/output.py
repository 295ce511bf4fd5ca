"""What commands put out: files, which are checked before the work and not behind it, and words about a run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from squall.run import Run


def out_path(out: str | None, name: str, beside: str) -> Path:
    """Where a command writes `name`: beside its input, into the directory `out`, or as the file that `out` names."""
    if out is None:
        return Path(beside).parent / name
    return Path(out) if Path(out).suffix and not Path(out).is_dir() else Path(out) / name


def check_output(path: Path, force: bool, *, beside: Sequence[Path] = (), example: str = "") -> None:
    """Raise `ValueError` with a remedy; `beside` is what is written as well, and `example` has the suffix it must have.

    What is there already is only written over by `force`.
    """
    if example and path.suffix != Path(example).suffix:
        raise ValueError(f"--output {path} does not end in {Path(example).suffix}: name a file such as {example}")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no directory {path.parent}: make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--output {path} cannot be written: {path.parent} is read-only: name another place")
    for there in (path, *beside):
        if there.is_dir():
            raise ValueError(f"{there} is a directory: choose another --output")
        if there.exists() and not force:
            raise ValueError(f"{there} exists already: write over it with --force, or choose another --output")


def summarized(run: Run, as_json: bool) -> tuple[int, str]:
    summary = run.summary()
    if as_json:
        document = {**summary.to_json_dict(), "run_directory": str(run.directory)}
        return 0, json.dumps(document) + "\n"
    return 0, f"{summary}\n report                 {run.directory / 'report.html'}\n"
