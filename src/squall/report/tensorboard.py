"""A run as TensorBoard shows it: event files in RUN/tensorboard. The x axis counts trained examples of all replicas."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

from squall.checks import require_extra
from squall.record.rows import EventRow, ExtraRow, MetricRow, PartRow, ProgressRow, Row, StalenessRow, StateRow
from squall.report.html import flat
from squall.report.model_graph import add_model_graph, add_no_graph
from squall.report.news import News
from squall.report.reader import Reader
from squall.task import Task

FOLDER = "tensorboard"  # in the run's directory
REPLICAS = 12  # with curves of their own
RECENT_S = 5.0  # examples per second are means over this much training time
KNOWN_S = 3600.0  # for which it is known how much was trained when: a run goes back to a snapshot, not to its beginning
OF_A_SCRIPT = "a script makes its model itself"  # why there is no graph
FLUSH_S = 5  # after so many seconds at the latest a running TensorBoard sees what is new


def writer_in(run_dir: Path) -> Any:
    """A `SummaryWriter` of the run's event files. TensorBoard reads all that lie there as one run."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir / FOLDER), flush_secs=FLUSH_S)


def begin_tensorboard(run_dir: Path, task: Task | str) -> None:
    """Write the plan and the model's graph; a text in place of the task says why there is none.

    Older event files are removed, because the record brings all that was in them. Raises `ValueError` where TensorBoard
    is not installed.
    """
    require_extra("tensorboard", "TensorBoard")
    for old in (run_dir / FOLDER).glob("events.out.tfevents.*"):
        old.unlink(missing_ok=True)
    with closing(writer_in(run_dir)) as writer:
        writer.add_text("plan", _plan(run_dir / "run.json"))
        if isinstance(task, str):
            add_no_graph(writer, task)
        else:
            add_model_graph(writer, task)


def _plan(path: Path) -> str:
    """`run.json` as a table in Markdown."""
    try:
        rows = flat(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        return f"The plan is not known: {path.name} cannot be read ({error})."
    lines = [f"| {name} | {value} |" for name, value in ((n, v.replace("|", "\\|")) for n, v in rows)]
    return "\n".join(["| setting | value |", "|---|---|", *lines])


def write_record(run_dir: Path) -> None:
    """Write event files of all that the run's record holds. Raises `RecordError` where there is none."""
    with closing(Reader(run_dir / "run.sqlite")) as reader, closing(TensorBoardViewer(run_dir)) as viewer:
        viewer.show(News().take(reader), now=0.0)


class TensorBoardViewer:
    """The viewer that writes event files. Replicas beyond the first `REPLICAS` share a histogram."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = writer_in(run_dir)
        self._began_at = 0.0  # seconds since 1970 at training time 0; a record of before does not tell
        self._times = [0.0]  # of reports, and the examples that all replicas had trained by then
        self._examples = [0]
        self._heard: dict[int, float] = {}  # replica -> training time of its last report

    def close(self) -> None:
        self._writer.close()

    def show(self, rows: Sequence[Row], now: float) -> None:
        for row in rows:
            match row:
                case StateRow("began_at", value):
                    self._began_at = float(value)
                case ProgressRow():
                    self._progress(row)
                case MetricRow():
                    self._scalar(f"{row.name}/validation", row.value, row.time_s, row.examples)
                case ExtraRow():
                    self._scalar(f"{row.name}/training", row.value, row.time_s)
                case PartRow() if row.replica < REPLICAS:
                    self._part(row)
                case EventRow():
                    text = f"{row.kind} {row.text}"
                    self._writer.add_text("events", text, self._trained(row.time_s), self._began_at + row.time_s)
        self._staleness(row for row in rows if isinstance(row, StalenessRow))
        self._forget()

    def _forget(self) -> None:
        """A run may last for weeks."""
        if self._times[-1] - self._times[0] > 2 * KNOWN_S:
            old = bisect_right(self._times, self._times[-1] - KNOWN_S)
            del self._times[: old - 1], self._examples[: old - 1]

    def _progress(self, row: ProgressRow) -> None:
        while len(self._times) > 1 and self._times[-1] > row.time_s:  # the run has gone back to a snapshot
            del self._times[-1], self._examples[-1]
        self._times.append(row.time_s)
        self._examples.append(self._examples[-1] + row.examples)
        since = row.time_s - min(row.time_s, RECENT_S)
        rate = (self._examples[-1] - self._trained(since)) / (row.time_s - since or 1.0)
        self._scalar("loss/training", row.loss, row.time_s)
        self._scalar("examples_per_second/all", rate, row.time_s)
        passed = row.time_s - self._heard.get(row.replica, 0.0)
        self._heard[row.replica] = row.time_s
        spent = row.compute_s + row.wait_s
        if row.replica < REPLICAS and passed > 0 and spent > 0:
            self._scalar(f"examples_per_second/replica_{row.replica}", row.examples / passed, row.time_s)
            self._scalar(f"waiting/replica_{row.replica}", row.wait_s / spent, row.time_s)

    def _part(self, row: PartRow) -> None:
        spent = row.compute_s + row.wait_s + row.bubble_s
        for name, seconds in (("waiting", row.wait_s), ("bubble", row.bubble_s)):
            if spent > 0:
                self._scalar(f"{name}/replica_{row.replica}_part_{row.part}", max(0.0, seconds) / spent, row.time_s)

    def _staleness(self, rows: Iterable[StalenessRow]) -> None:
        """A histogram for each report."""
        for (time_s, replica), report in groupby(rows, lambda row: (row.time_s, row.replica)):
            pushes: dict[int, int] = defaultdict(int)
            for row in report:
                pushes[row.staleness] += row.count
            who = f"replica_{replica}" if replica < REPLICAS else "others"
            self._writer.add_histogram_raw(
                f"staleness/{who}", **histogram(pushes), global_step=self._trained(time_s),
                walltime=self._began_at + time_s,
            )  # fmt: skip

    def _scalar(self, tag: str, value: float, time_s: float, examples: int | None = None) -> None:
        step = self._trained(time_s) if examples is None else examples
        self._writer.add_scalar(tag, value, step, self._began_at + time_s)

    def _trained(self, time_s: float) -> int:
        """Examples that all replicas had trained at that time."""
        return self._examples[max(0, bisect_right(self._times, time_s) - 1)]


def histogram(counts: dict[int, int]) -> dict[str, Any]:
    """Counts of whole numbers as `add_histogram_raw` takes them: a bucket of width 1 around each."""
    limits: list[float] = []
    in_bucket: list[int] = []
    for number, count in sorted(counts.items()):
        if not limits or limits[-1] != number - 0.5:  # the bucket before ends where this one begins
            limits.append(number - 0.5)
            in_bucket.append(0)
        limits.append(number + 0.5)
        in_bucket.append(count)
    return {
        "min": min(counts), "max": max(counts), "num": sum(counts.values()),
        "sum": sum(number * count for number, count in counts.items()),
        "sum_squares": sum(number * number * count for number, count in counts.items()),
        "bucket_limits": limits, "bucket_counts": in_bucket,
    }  # fmt: skip
