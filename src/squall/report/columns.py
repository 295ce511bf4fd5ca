"""A run's course as plain columns: what `pandas.DataFrame` and `polars.DataFrame` take as they are."""

from dataclasses import fields
from typing import Any, NamedTuple

from squall.record.rows import MetricRow, ProgressRow
from squall.report.reader import Reader

Columns = dict[str, list[Any]]  # name -> values, one for each row


class History(NamedTuple):
    """Two tables.

    Attributes:
        evaluations: time_s, epoch, examples and updates of the weights, and a column for each metric; None where an
            evaluation did not have it.
        progress: what each replica has reported, as `record.Progress` has it.
    """

    evaluations: Columns
    progress: Columns


def history(reader: Reader) -> History:
    """Of an unfinished run, what it has done so far."""
    names = [field.name for field in fields(ProgressRow)]
    rows = reader.rows(ProgressRow)
    progress = {name: [getattr(row, name) for row in rows] for name in names}
    return History(_evaluations(reader.rows(MetricRow)), progress)


def _evaluations(metrics: list[MetricRow]) -> Columns:
    found: dict[tuple[float, int, int, int], dict[str, float]] = {}
    for metric in metrics:
        label = (metric.time_s, metric.epoch, metric.examples, metric.updates)
        found.setdefault(label, {})[metric.name] = metric.value
    columns: Columns = {name: list(values) for name, values in zip(_LABEL, zip(*found) if found else [()] * 4)}
    names = dict.fromkeys(metric.name for metric in metrics)
    return columns | {name: [values.get(name) for values in found.values()] for name in names}


_LABEL = ("time_s", "epoch", "examples", "updates")
