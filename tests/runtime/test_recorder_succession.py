"""Whoever goes on in the place of a coordinator that was killed, the record is what one alone would have written."""

from __future__ import annotations

import pickle
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

import squall
from squall.plan import make_plan
from squall.protocol.effects import Effect, PublishSnapshot
from squall.protocol.leases import Leases, Limits
from squall.protocol.messages import Lease, Stats, Weights
from squall.protocol.nodes import replica_node
from squall.protocol.notes import (
    LeaseEnded,
    MemberDied,
    Remark,
    SnapshotAsked,
    TrainingBegan,
    WeightsMeasured,
    WorkReported,
)
from squall.record.rows import Row
from squall.record.writer import table_name
from squall.runtime.job import Job, private_job
from squall.runtime.journal import Journal
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.run_plan import Aims
from squall.runtime.snapshot import Snapshots
from squall.vector import Layout
from tests.runtime.test_recorder import Nobody
from tests.tasks import INLINE, regression

R0, R1 = replica_node(0, 0), replica_node(1, 0)
LEDGER = Leases(400, 10, Limits()).state()


def story() -> list[Effect]:
    """What a coordinator has its host do: leases that are put together, reports, snapshots, deaths, evaluations."""
    told: list[Effect] = [TrainingBegan()]
    for number in range(24):
        node = (R0, R1)[number % 2]
        told.append(WorkReported(node, Stats(10, 1, loss_sum=5.0 - number / 10, pushes=1, staleness={number % 3: 1})))
        told.append(LeaseEnded(Lease(number, 0, 10 * number, 10 * number + 10), node, 0.5, 10 * number + 10))
        if number % 6 == 2:
            told.append(WeightsMeasured({"loss": 1.0}, Weights(number, 10 * number, 0.0)))
        if number % 6 == 3:
            told.append(SnapshotAsked(1 + number // 6))
        if number % 6 == 5:
            snapshot = 1 + number // 6
            told.append(PublishSnapshot(snapshot, LEDGER, (number,), (10 * number,), {}, (7,), False))
        if number % 8 == 7:
            told += [MemberDied(R1, "killed by SIGKILL"), Remark("warning", f"the {number}th")]
    return told


STORY = story()


class Evaluated(Nobody):
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def evaluated(self, number: int, evaluation: dict[str, float]) -> None:
        self.numbers.append(number)


def job(directory: Path) -> Job:
    strategy, task = squall.Downpour(replicas=2), regression(examples=400)()
    plan = make_plan(strategy, INLINE, Aims(epochs=1))
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    return private_job(plan, strategy, task, layout, directory)


class Coordinators:
    """One after the other: each tells a part of the story at its times, and the next takes again what it lacks."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.channel = Evaluated()
        self._snapshots = Snapshots(directory)
        self._journal = Journal(bytearray(1 << 20))
        self._job = replace(job(directory), journal=self._journal)
        self._host = self._new()
        self._cut_at = self._told = 0
        self._kept = pickle.dumps(self._host.keeps())

    def _new(self) -> CoordinatorHost:
        return CoordinatorHost(self._job, self.channel, lambda: self.now)

    def tell(self, upto: int, commits: set[int], cuts: set[int]) -> None:
        for number in range(self._told, upto):
            effect, self.now = STORY[number], self._at(number)
            if isinstance(effect, PublishSnapshot):
                self._snapshots.make_room(effect.number)
            self._host.perform(effect, self.now)
            if number in commits:
                self._host.record.commit(self.now, force=True)
            if number in cuts:
                self._kept, self._cut_at = pickle.dumps(self._host.keeps()), number + 1
        self._told = upto

    def die(self, untold: bool) -> None:
        """`untold`: the next one does not know of what was done last."""
        self._told -= untold and self._told > self._cut_at
        self._host.record._db.close()
        self._journal.kept = pickle.loads(self._kept)
        self._host = self._new()
        self._host.take_again(self._host, [(STORY[n], self._at(n)) for n in range(self._cut_at, self._told)])

    def end(self) -> None:
        self._host.record.close()

    @staticmethod
    def _at(number: int) -> float:
        return 10.0 + number / 8


def rows(directory: Path) -> dict[str, Any]:
    """Rows with a key are in any order. The directory is named in what is told of a snapshot."""
    found = {}
    with closing(sqlite3.connect(directory / "run.sqlite")) as db:
        for table in map(table_name, get_args(Row)):
            read = [str(row).replace(str(directory), "") for row in db.execute(f"SELECT * FROM {table}")]
            found[table] = sorted(read)
    return {
        table: [row for row in read if "'began_at'" not in row and "_step_s'" not in row]
        for table, read in found.items()
    }


def alone(directory: Path) -> tuple[dict[str, Any], list[int]]:
    coordinators = Coordinators(directory)
    coordinators.tell(len(STORY), set(), set())
    coordinators.end()
    return rows(directory), coordinators.channel.numbers


places = st.integers(0, len(STORY) - 1)


@given(
    deaths=st.lists(st.tuples(places, st.booleans()), min_size=1, max_size=4), commits=st.sets(places),
    cuts=st.sets(places, max_size=4),
)  # fmt: skip
def test_the_record_is_the_same(deaths: list[tuple[int, bool]], commits: set[int], cuts: set[int]) -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        wanted, told = alone(Path(one))
        coordinators = Coordinators(Path(other))
        for at, untold in sorted(deaths):
            coordinators.tell(max(at, coordinators._told), commits, cuts)
            coordinators.die(untold)
        coordinators.tell(len(STORY), commits, cuts)
        coordinators.end()
        assert rows(Path(other)) == wanted
        assert sorted(set(coordinators.channel.numbers)) == told, "numbers tell which evaluation was told before"
