"""Rows that the nursery of a script's run adds to the record after the coordinator has closed it.

A training ends before its script does: behind the loop a script measures the final weights, and it may still fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from squall.record.rows import EventRow, MetricRow, StateRow
from squall.record.writer import Record
from squall.report import Reader, summarize
from squall.runtime.job import Job


@contextmanager
def _reopened(job: Job) -> Iterator[tuple[Record, Reader]]:
    path = job.directory / "run.sqlite"
    with closing(Reader(path)) as reader, closing(Record(path)) as record:
        yield record, reader


def add_values(job: Job, values: Mapping[str, float]) -> None:
    """Add what a script has logged of the final weights. Raises `RecordError`."""
    with _reopened(job) as (record, reader):
        done, size = summarize(reader), job.task.examples
        left_out = sum(stop - start for start, stop in reader.skipped(size))
        label = (done.training_s, (done.examples + left_out) // size, done.examples, done.updates or 0)
        for name, value in values.items():
            record.add(MetricRow(*label, name, value))


def add_end(job: Job, status: str, reason: str) -> None:
    """Add how the script has ended; why the training ended stays as it is. Raises `RecordError`."""
    with _reopened(job) as (record, reader):
        record.add(StateRow("status", status))
        record.add(StateRow("reason", reason))
        kind = "stopped" if status == "interrupted" else "error"
        record.add(EventRow(summarize(reader).training_s, kind, reason))
