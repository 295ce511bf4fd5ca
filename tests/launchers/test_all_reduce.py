"""All-reduce when processes die or are stopped: real processes, real signals."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest

from squall.record.rows import MemberRow, ProgressRow
from squall.report import Reader, audit
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import START_S, Started, wait_for

ENDLESS = 100_000


@contextmanager
def training(directory: Path, replicas: int, epochs: int = ENDLESS, *flags: str) -> Iterator[Started]:
    """So many replicas that have all trained."""
    size = ("--replicas", str(replicas), "--epochs", str(epochs))
    run = Started.train(directory / f"run-{uuid4().hex[:8]}", "--strategy", "all_reduce", *size, *flags)
    try:
        for replica in range(replicas):
            run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
        yield run
    finally:
        run.process.kill()
        run.finish()
        wait_for(run.gone, 10, "the processes to end")


def examples(run: Started) -> int:
    return sum(row.examples for row in run.rows(ProgressRow))


def check_end(run: Started, epochs: int) -> None:
    """It ends well, and each example of each epoch was trained once."""
    status, _, err = run.finish()
    assert status == 0, err
    assert examples(run) == epochs * EXAMPLES
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        found = audit(reader)
    assert [span for epoch in found.epochs for span in epoch.spans if (len(span), span.times) != (EXAMPLES, 1)] == []
    assert sum(len(epoch) for epoch in found.epochs) == epochs


def interrupt(run: Started) -> str:
    """See it end in order and in time; what it has said."""
    run.process.send_signal(signal.SIGINT)
    assert wait_for(run.gone, 6.0, "the children to be gone") < 3.0
    status, out, err = run.finish()
    assert status == 130, err
    assert "Traceback" not in err
    assert f"squall resume {run.directory}" in out + err
    assert Snapshots(run.directory).numbers()
    return err


KILLS = [
    (2, ["replica 0"]),  # whose weights the others would take
    (2, ["replica 1"]),
    (5, ["replica 0", "replica 3"]),
    (3, ["replica 0", "replica 2"]),
    (5, ["replica 3"]),
    (3, ["replica 1"]),
]


@pytest.mark.parametrize(("replicas", "victims"), deep.sweep(KILLS, 3))
def test_killed_replicas_are_replaced_and_no_example_is_lost(tmp_path: Path, replicas: int, victims: list[str]) -> None:
    with training(tmp_path, replicas, 8) as run:
        old = run.processes()
        for victim in victims:
            os.kill(old[victim], signal.SIGKILL)
        check_end(run, 8)
        newcomers = {int(victim.split()[1]): f"replica-{victim.split()[1]}.1" for victim in victims}
        changes = {(row.node, row.change): row for row in run.rows(MemberRow)}
        for index, node in newcomers.items():
            assert "SIGKILL" in changes[node.replace(".1", ".0"), "lost"].why
            joined = changes[node, "joined"]
            assert [row for row in run.rows(ProgressRow) if row.replica == index and row.time_s > joined.time_s]


@pytest.mark.parametrize("seed", deep.seeds(1, 12))
def test_kills_at_any_moment_lose_no_example(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with training(tmp_path, 3, 10) as run:
        moments = sorted(chance.randrange(6 * EXAMPLES) for _ in range(3))
        for moment in moments:
            wait_for(lambda moment=moment: examples(run) >= moment, START_S, f"{moment} examples")
            victims = sorted(role for role in run.processes() if role.startswith("replica"))
            with suppress(KeyError, ProcessLookupError):  # it is gone itself, from an earlier kill
                run.kill(chance.choice(victims))
        check_end(run, 10)
