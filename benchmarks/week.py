"""What a week's run keeps, and what it costs when its record cannot be written.

Bytes of the schedule are of its compressed pieces, since a long run has little else. The record's grow with the epochs
and not with the pushes (leases are folded, reports thinned), so they are not among them. In some runs another program
holds the record's lock from the first rows to the end; the rates are told by the rows, which are written behind that.
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch

import squall
from benchmarks.results import Section, rounds
from benchmarks.squall_training import STEADY_AFTER_S, steady, training_task
from benchmarks.workloads import digits_mlp
from squall.runtime.schedule import BEGIN, MAGIC, PIECE

SECONDS = 4.0
LONG_S = 60.0
PUSHES = 500 * 7 * 24 * 3600  # of a week
MOST_GB = 2.0


def measure(repeats: int = 8) -> Section:
    print("week", flush=True)
    section = Section(
        "A week's run",
        "Downpour with two replicas and two shards on the digits, with and without another program that locks the"
        " record; and the schedule of a minute, as a week at 500 pushes a second would have it.",
    )
    found = rounds({"locked": partial(_examples_s, True), "free": partial(_examples_s, False)}, repeats)
    ratio = statistics.median(a / b for a, b in zip(found["locked"], found["free"]))
    figures = [f"{statistics.median(found[name]):,.0f} examples/s" for name in ("locked", "free")]
    section.at_least("training while the record is locked", figures[0], f"free {figures[1]}", ratio, 0.95)
    bytes_each = _bytes_of_a_push()
    section.below("schedule", f"{bytes_each:.1f} bytes a push", PUSHES * bytes_each / 1e9, MOST_GB, "GB a week")
    return section


def _examples_s(locked: bool) -> float:
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder, _locked(Path(folder), locked):
        return steady(_trained(Path(folder) / "run", SECONDS + STEADY_AFTER_S))


def _trained(directory: Path, seconds: float) -> squall.Run:
    strategy = squall.Downpour(replicas=2, shards=2, optimizer=partial(torch.optim.SGD, lr=0.01))
    settings = squall.Settings(threads=1, seconds=seconds, snapshot_every_s=None, progress=False)
    return squall.fit(training_task(digits_mlp((64,))), strategy, run_dir=directory, settings=settings)


@contextmanager
def _locked(folder: Path, locked: bool) -> Iterator[None]:
    """Another program's lock, from the record's first report until the run would end."""
    over = threading.Event()
    holder = threading.Thread(target=_hold, args=(folder / "run" / "run.sqlite", over))
    if locked:
        holder.start()
    try:
        yield
    finally:
        over.set()
        if locked:
            holder.join()


def _hold(record: Path, over: threading.Event) -> None:
    while not over.wait(0.05):
        if not record.exists():
            continue
        with closing(sqlite3.connect(record, timeout=1.0, isolation_level=None)) as db:
            if _has_begun(db):
                db.execute("BEGIN IMMEDIATE")
                over.wait(SECONDS)
                return


def _has_begun(db: sqlite3.Connection) -> bool:
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    return "progress" in tables and db.execute("SELECT count(*) FROM progress").fetchone()[0] > 0


def _bytes_of_a_push() -> float:
    """Of the schedules of a run, had they been compressed to their ends."""
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        run = _trained(Path(folder) / "run", LONG_S)
        found = 0.0
        for file in (run.directory / "schedule" / "0").glob("packed-*"):
            plain = file.with_name(file.name.removeprefix("packed-"))
            pieces = int.from_bytes(plain.read_bytes()[len(MAGIC) : BEGIN], "little")
            found += file.stat().st_size * (1 + plain.stat().st_size / (pieces * PIECE))
        return found / (run.summary().updates or 1)


if __name__ == "__main__":
    print(measure().markdown())
