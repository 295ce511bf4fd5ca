"""Folded leases tell of every example what single ones told, also when the record goes back to a snapshot."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from squall.record.rows import LeaseRow
from squall.record.writer import Record
from squall.report import Reader
from squall.report.spans import coverage
from squall.runtime.folding import Folding

EXAMPLES = 12


class Ledger:
    """Leases of one to three examples, dealt in order and ended in any."""

    def __init__(self, record: Record, chance: random.Random) -> None:
        self.record, self.chance = record, chance
        self.folding = Folding(record, EXAMPLES)
        self.next_id = self.position = 0
        self.held: dict[int, tuple[int, int]] = {}
        self.trained: list[tuple[int, int]] = []  # positions through all epochs
        self.snapshots: dict[int, tuple[int, list[int], list[tuple[int, int]]]] = {}
        self.asked = 0

    def step(self) -> None:
        match self.chance.choice(["deal", "deal", "end", "end", "end", "ask", "publish", "twice"]):
            case "deal":
                stop = min(self.position + self.chance.randint(1, 3), (self.position // EXAMPLES + 1) * EXAMPLES)
                self.held[self.next_id] = (self.position, stop)
                self.next_id, self.position = self.next_id + 1, stop
            case "end" if self.held:
                self.end(self.chance.choice(list(self.held)))
            case "ask":
                self.asked += 1
                self.folding.asked(self.asked)
                self.snapshots[self.asked] = (self.next_id, list(self.held), list(self.trained))
            case "publish" if self.asked:
                for number in [number for number in self.snapshots if number < self.asked][:-1]:
                    del self.snapshots[number]
                self.folding.published(sorted(self.snapshots))
            case "twice" if self.trained and self.chance.random() < 0.1:
                self.held[self.next_id] = self.chance.choice(self.trained)
                self.next_id += 1

    def end(self, lease: int) -> None:
        start, stop = self.held.pop(lease)
        upto = self.chance.choice([stop, stop, stop, start])
        if upto < stop:  # given back, and dealt again
            self.held[self.next_id] = (upto, stop)
            self.next_id += 1
        epoch = start // EXAMPLES
        at = epoch * EXAMPLES
        replica = self.chance.randrange(2)
        self.folding.add(LeaseRow(lease, epoch, start - at, stop - at, replica, 0, 0.0, 1.0, upto - at))
        if upto > start:
            self.trained.append((start, upto))


def told(path: Path) -> Counter[int]:
    with closing(Reader(path)) as reader:
        spans = list(coverage(reader.trained(EXAMPLES)))
    return Counter({p: span.times for span in spans for p in range(span.start, span.stop) if span.times})


def counted(trained: list[tuple[int, int]]) -> Counter[int]:
    return Counter(position for start, stop in trained for position in range(start, stop))


@pytest.mark.parametrize("seed", range(25))
def test_every_example_is_told_as_often_as_it_was_trained(tmp_path: Path, seed: int) -> None:
    path, chance = tmp_path / "run.sqlite", random.Random(seed)
    with closing(Record(path)) as record:
        ledger = Ledger(record, chance)
        for step in range(120):
            ledger.step()
            if chance.random() < 0.3:
                record.commit(float(step), force=True)
        record.commit(1e6, force=True)
        assert told(path) == counted(ledger.trained)
        if ledger.snapshots:
            next_id, held, trained = ledger.snapshots[chance.choice(list(ledger.snapshots))]
            record.rewind(1e9, next_id, next_id, held)
            assert told(path) == counted(trained)


def test_a_long_run_has_few_rows(tmp_path: Path) -> None:
    """Two replicas take turns for 5,000 epochs, with a snapshot now and then."""
    path = tmp_path / "run.sqlite"
    with closing(Record(path)) as record:
        folding = Folding(record, EXAMPLES)
        for number in range(5_000 * EXAMPLES // 4):
            number ^= 1  # out of order
            epoch, start = divmod(4 * number, EXAMPLES)
            folding.add(LeaseRow(number, epoch, start, start + 4, number % 2, 0, 0.0, 1.0, start + 4))
            if number % 1000 == 1:
                folding.asked(number // 1000 + 1)
                folding.published([number // 1000, number // 1000 + 1])
    with closing(Reader(path)) as reader:
        rows = reader.rows(LeaseRow)
    assert len(rows) <= 10
    assert sum(row.stop - row.start for row in rows) == 5_000 * EXAMPLES
