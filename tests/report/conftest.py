import itertools
import json
import math
from contextlib import closing
from pathlib import Path

import pytest

from squall.record.rows import EventRow, LeaseRow, MemberRow, MetricRow, ProgressRow, Row, StalenessRow, StateRow
from squall.record.writer import Record

SIZE, EPOCHS = 1000, 2


def write(path: Path, rows: list[Row]) -> Path:
    """Append rows to the record at `path`."""
    with closing(Record(path)) as record:
        for row in rows:
            record.add(row)
    return path


def state(**values: object) -> list[Row]:
    return [StateRow(key, str(value)) for key, value in values.items()]


def work(time_s: float, replica: int, examples: int, loss: float = 1.0) -> ProgressRow:
    return ProgressRow(time_s, replica, examples, examples // 50, loss, 0.75, 0.25, 400, 400)


_numbers = itertools.count()


def lease(epoch: int, start: int, stop: int, trained_stop: int | None = None) -> LeaseRow:
    return LeaseRow(next(_numbers), epoch, start, stop, 0, 0, 0.0, 1.0, stop if trained_stop is None else trained_stop)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of two replicas, two epochs of 1,000 examples, in ten seconds; the second replica is slower."""
    rows = state(
        epochs=EPOCHS, examples_per_epoch=SIZE, replicas=2, shards=1, strategy="downpour", optimizer="Adagrad, lr 0.02"
    )
    rows += state(status="finished", ended="data", reason="all data is trained")
    rows += state(first_step_s=1.5, training_s=10.0, updates=40)
    rows += [EventRow(0.0, "started", ""), MemberRow("replica-0", 11, 0.0, "joined", "")]
    for second in range(1, 11):
        loss = math.exp(-second / 5)
        rows += [work(second, 0, 150, loss), work(second, 1, 50, loss)]
        rows += [StalenessRow(second, 0, 0, 3), StalenessRow(second, 1, 3, 1)]
    for time_s, accuracy in ((5.0, 0.5), (10.0, 0.875)):
        done = int(time_s) * 200
        rows.append(MetricRow(time_s, done // SIZE - 1, done, done // 50, "loss", 1 - accuracy))
        rows.append(MetricRow(time_s, done // SIZE - 1, done, done // 50, "accuracy", accuracy))
    rows += [lease(epoch, start, start + 250) for epoch in range(EPOCHS) for start in range(0, SIZE, 250)]
    rows += [MemberRow("replica-1", 12, 6.0, "lost", "killed by SIGKILL"), EventRow(10.0, "finished", "2 epochs")]
    folder = tmp_path / "2026-11-21-01"
    folder.mkdir()
    write(folder / "run.sqlite", rows)
    plan = {"strategy": {"name": "Downpour", "replicas": 2}, "epochs": EPOCHS}
    settings = {"plan": plan, "versions": {"torch": "2.13.0"}, "seed": 7}
    (folder / "run.json").write_text(json.dumps(settings))
    return folder
