"""Why a schedule is not there: its process was lost with its machine, and nobody could hand it over."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from squall.record.rows import MemberRow, RecordError
from squall.report import Reader


def not_there(path: Path, directory: Path) -> str:
    """Of the file of a process, in words; `directory` is the run's."""
    try:
        with closing(Reader(directory / "run.sqlite")) as reader:
            lost = {row.node: row.why for row in reader.rows(MemberRow) if row.change == "lost"}
    except RecordError:
        lost = {}
    return f"{path} is not there" + (f": {lost[path.name]}" if path.name in lost else "")
