"""Files that a command is to write: whether it can is asked before the work, not behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def check_output(path: Path, force: bool, *, beside: Sequence[Path] = (), example: str = "") -> None:
    """Raise `ValueError` with a remedy; `beside` is what is written as well, and `example` has the suffix it must have.

    What is there already is only written over by `force`.
    """
    if example and path.suffix != Path(example).suffix:
        raise ValueError(f"--output {path} does not end in {Path(example).suffix}: name a file such as {example}")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no directory {path.parent}: make it first")
    for there in (path, *beside):
        if there.is_dir():
            raise ValueError(f"{there} is a directory: choose another --output")
        if there.exists() and not force:
            raise ValueError(f"{there} exists already: write over it with --force, or choose another --output")
