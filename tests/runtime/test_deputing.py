"""A deputy's record is the coordinator's, and goes on from it on another machine."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.protocol.backup import TakeCopy
from squall.protocol.copied import Copied, CopyTo
from squall.protocol.deputies import Deputed
from squall.protocol.effects import End, Payload, PublishSnapshot
from squall.protocol.evaluator import Evaluator
from squall.protocol.events import CopyKnown, CopyTaken, PeerRefused
from squall.protocol.nodes import COORDINATOR, DEPUTY, Node
from squall.runtime import whole
from squall.runtime.deputing import KNOWN, CopiedHost, DeputyHost, Kept
from squall.runtime.journal import Journal
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.snapshot import Snapshots
from tests.runtime.test_recorder_succession import STORY, Coordinators, alone, job, places, rows


class Moving:
    """A coordinator on one machine, its deputy on another, and the coordinator that goes on there."""

    def __init__(self, one: Path, other: Path) -> None:
        self.first = Coordinators(one)
        self._one, self._other = one, other
        self._directory = other / "run"
        self._directory.mkdir()
        self._journal = Journal(bytearray(1 << 20))
        there = replace(job(other), scratch=other, deputies={DEPUTY: Kept(self._journal, self._directory, -1)})
        self._there = replace(there, journal=self._journal, directory=self._directory)
        self.deputy = DeputyHost(there, DEPUTY, lambda recorder, job: recorder)
        self._begun = 0
        self.told: list[bool] = []  # whether there is a deputy

    def packs(self) -> CopiedHost:
        return CopiedHost(self.first._host, replace(self.first._job, scratch=self._one), self.told.append)

    def copy(self, state: bytes) -> Any:
        known = self.packs().perform(CopyTo(DEPUTY, 1, (), state), 0.0)
        assert isinstance(known, CopyKnown)
        whole.path_of(self._one, DEPUTY, 0).rename(whole.path_of(self._other, DEPUTY, 0))
        self._begun = self.first._told
        return self.deputy.perform(TakeCopy(Payload("copy", DEPUTY, known.size, 0, 0)), 0.0)

    def follow(self) -> None:
        for number in range(self._begun, self.first._told):
            self.deputy._copied._now = self.first._at(number)  # type: ignore[union-attr]  # as its entry says
            self.deputy.perform(STORY[number], 1e6)
        self.deputy.perform(End("finished"), 1e6)

    def lead(self) -> None:
        """Over the rest of the story."""
        self._journal.kept = pickle.loads(pickle.dumps(self.deputy._host.keeps()))  # type: ignore[union-attr]
        for before in (self.deputy._host, self.first._host):
            before.record._db.close()  # type: ignore[union-attr]
        host = CoordinatorHost(self._there, self.first.channel, lambda: now)
        host.take_again(host, [])
        for number in range(self.first._told, len(STORY)):
            now = self.first._at(number)
            if isinstance(effect := STORY[number], PublishSnapshot):
                Snapshots(self._directory).make_room(effect.number)
            host.perform(effect, now)
        host.record.close()

    def rows(self) -> dict[str, Any]:
        """Of a snapshot that the first one has made, the directory there is named."""
        found = rows(self._directory).items()
        return {table: sorted(row.replace(str(self._one), "") for row in read) for table, read in found}


def state() -> bytes:
    linked = Copied(Evaluator(Node("evaluator", 1), 1), Journal(bytearray(1 << 20)))
    return pickle.dumps(linked)


@settings(max_examples=25)  # each makes three records
@given(places, places, st.sets(places))
def test_a_deputys_record_is_the_coordinators(begins: int, leads: int, commits: set[int]) -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as other, TemporaryDirectory() as third:
        wanted, _ = alone(Path(third))
        moving = Moving(Path(one), Path(other))
        moving.first.tell(min(begins, leads), commits, set())
        assert isinstance(moving.copy(state()), CopyTaken)
        moving.first.tell(max(begins, leads), commits, set())
        moving.follow()
        moving.lead()
        assert moving.rows() == wanted


def test_who_launched_the_run_is_told_whether_there_is_a_deputy() -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        moving = Moving(Path(one), Path(other))
        moving.copy(state())
        packs = moving.packs()
        packs.perform(Deputed(True), 0.0)
        packs.perform(CopyTo(None), 0.0)
        assert moving.told == [False, True, False]


def test_what_is_no_coordinator_is_refused() -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        moving = Moving(Path(one), Path(other))
        refused = moving.copy(pickle.dumps(os.getpid))
        assert isinstance(refused, PeerRefused)
        assert refused.node == COORDINATOR


def test_of_what_its_host_knows_the_recorders_classes_alone_are_made() -> None:
    with pytest.raises(pickle.UnpicklingError, match="is in no such state"):
        whole.known(pickle.dumps({"recorder": os.getpid}), KNOWN)
