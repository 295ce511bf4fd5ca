"""Rows that the nursery of a script's run adds to the record after the coordinator has closed it.

A training ends before its script does: behind the loop a script measures the final weights, and it may still fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from squall.record.rows import EventRow, MetricRow, StateRow
from squall.record.writer import Record
from squall.runtime.job import Job

if TYPE_CHECKING:
    from squall.report import Reader, Summary


@contextmanager
def _reopened(job: Job) -> Iterator[tuple[Record, Reader, Summary]]:
    """With what the record has so far."""
    from squall.report import Reader, summarize  # few nurseries come here, and all would wait for rich as they start

    path = job.directory / "run.sqlite"
    with closing(Reader(path)) as reader, closing(Record(path)) as record:
        yield record, reader, summarize(reader)


def add_values(job: Job, values: Mapping[str, float]) -> None:
    """Add what a script has logged of the final weights. Raises `RecordError`."""
    with _reopened(job) as (record, reader, done):
        size = job.task.examples
        left_out = sum(stop - start for start, stop in reader.skipped(size))
        label = (done.training_s, (done.examples + left_out) // size, done.examples, done.updates or 0)
        for name, value in values.items():
            record.add(MetricRow(*label, name, value))


def add_end(job: Job, status: str, reason: str) -> None:
    """Add how the script has ended; why the training ended stays as it is. Raises `RecordError`."""
    with _reopened(job) as (record, _, done):
        record.add(StateRow("status", status))
        record.add(StateRow("reason", reason))
        kind = "stopped" if status == "interrupted" else "error"
        record.add(EventRow(done.training_s, kind, reason))
