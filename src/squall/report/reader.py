"""Read a run's record while it is being written, or long after."""

import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import merge
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from squall.record.rows import (
    ActivityRow,
    MetricRow,
    PartRow,
    ProgressRow,
    RecordError,
    Row,
    StalenessRow,
    record_error,
    table_name,
)

R = TypeVar("R", bound=Row)


class Reader:
    """A read-only view of a record, for one thread at a time, valid while the writer goes on."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise RecordError(f"no record at {self.path}: give the folder of a run, such as runs/<name>")
        address = f"file:{quote(str(self.path.absolute()))}?mode=ro"
        try:
            self._db = sqlite3.connect(address, uri=True, timeout=2.0, check_same_thread=False)
        except sqlite3.Error as error:
            raise record_error("read", self.path, error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextmanager
    def at_one_moment(self) -> Iterator[None]:
        """All that is read in here is of the record as it is now."""
        self._query("BEGIN")
        try:
            yield
        finally:
            self._query("COMMIT")

    def since(self, table: type[R], rowid: int = 0) -> tuple[list[R], int]:
        """Rows written after `rowid`, oldest first, and the rowid to ask with next time."""
        found = self._query(f"SELECT rowid, * FROM {table_name(table)} WHERE rowid > ? ORDER BY rowid", rowid)
        if not found:  # a run that goes on from a snapshot forgets rows, and gives their rowids again
            return [], min(rowid, self.newest(table))
        return [_row(table, values[1:]) for values in found], found[-1][0]

    def newest(self, table: type[R]) -> int:
        """The rowid of the last row; 0 where there is none."""
        found = self._query(f"SELECT coalesce(max(rowid), 0) FROM {table_name(table)}")
        return int(found[0][0]) if found else 0  # there is none before the table is made

    def rows(self, table: type[R]) -> list[R]:
        """All rows of a table, oldest first; leases by number."""
        return self.since(table, -1)[0]

    def trained(self, size: int) -> Iterator[tuple[int, int]]:
        """What leases trained as ranges of positions, counted through all epochs of `size` examples, by their start."""
        first, skips = "epoch * :size + start", self._skips()
        with_skips = ", ".join(str(lease) for lease, *_ in skips)
        query = f"""SELECT {first}, {first} + trained_stop - start FROM lease
                    WHERE trained_stop > start AND lease NOT IN ({with_skips}) ORDER BY 1"""
        parts: list[tuple[int, int]] = []  # of leases with skips: what was trained between those
        for _, of_lease in groupby(skips, key=itemgetter(0)):
            rows = list(of_lease)
            zero, begin, end = size * rows[0][1], rows[0][4], rows[0][5]
            edges = [begin, *(edge for row in rows for edge in row[2:4]), end]
            parts += [(zero + start, zero + stop) for start, stop in zip(edges[::2], edges[1::2]) if start < stop]
        try:
            whole = self._db.execute(query, {"size": size})
            yield from merge(whole, sorted(parts))
        except sqlite3.Error as error:
            raise record_error("read", self.path, error) from error

    def skipped(self, size: int, why: str | None = None) -> list[tuple[int, int]]:
        """What was left out, for that reason or any, as ranges of positions that are counted as in `trained`."""
        found = [skip for skip in self._skips() if why is None or skip[-1] == why]
        return sorted((epoch * size + start, epoch * size + stop) for _, epoch, start, stop, *_ in found)

    def _skips(self) -> list[tuple[int, int, int, int, int, int, str]]:
        """The skips that count: lease, epoch, start, stop, the lease's start and trained stop, and why."""
        told = self._query("SELECT 1 FROM pragma_table_info('skip') WHERE name = 'why'")  # not in older records
        why = "why" if told else "''"
        return self._query(
            f"""SELECT lease, skip.epoch, skip.start, skip.stop, lease.start, lease.trained_stop, {why}
               FROM skip JOIN lease USING (lease) WHERE skip.stop <= lease.trained_stop ORDER BY 1, 3"""
        )

    def dealt(self, size: int) -> int:
        """The position behind all leases, counted as in `trained`."""
        found = self._query("SELECT MAX(epoch * ? + stop) FROM lease", size)
        return (found[0][0] or 0) if found else 0

    def longest(self) -> int:
        """Examples of an epoch, as far as leases tell, for a record that does not name them."""
        found = self._query("SELECT MAX(stop) FROM lease")
        return (found[0][0] or 0) if found else 0

    def state(self) -> dict[str, str]:
        """What is known about the whole run, by key."""
        return dict(self._query("SELECT key, value FROM state"))

    def metrics(self) -> dict[str, MetricRow]:
        """The last result of every metric, by name."""
        last = "SELECT MAX(rowid) FROM metric GROUP BY name"
        found = self._query(f"SELECT * FROM metric WHERE rowid IN ({last}) ORDER BY rowid")
        return {metric.name: metric for metric in (_row(MetricRow, values) for values in found)}

    def progress(self, bin_s: float = math.inf) -> list[ProgressRow]:
        """Each replica's work, added up within bins of `bin_s` seconds (by default: over the whole run).

        `time_s` and `clock` are those of the last report in the bin; `loss` the mean per example where it was a number.
        """
        found = self._query(
            """SELECT MAX(time_s), replica, SUM(examples), SUM(batches),
                      SUM(loss * examples) / SUM(CASE WHEN loss IS NULL THEN 0.0 ELSE examples END),
                      TOTAL(compute_s), TOTAL(wait_s), SUM(pushed_bytes), SUM(fetched_bytes), MAX(clock)
               FROM progress GROUP BY CAST(time_s / ? AS INTEGER), replica ORDER BY 1, 2""",
            bin_s,
        )
        return [_row(ProgressRow, values) for values in found]

    def activity(self, start_s: float, stop_s: float, bin_s: float = 0.0) -> list[ActivityRow]:
        """What processes did between two moments; with bins, added up within them, and whom they waited for most."""
        if not bin_s:
            query = "SELECT * FROM activity WHERE time_s > ? AND time_s <= ? ORDER BY rowid"
            return [_row(ActivityRow, values) for values in self._query(query, start_s, stop_s)]
        found = self._query(  # of the columns that are no sums SQLite takes those of the row with the MAX
            """SELECT ?1 + ?3 * (bin + 1), machine, node, TOTAL(seconds), TOTAL(compute_s), TOTAL(apply_s),
                      TOTAL(send_s), TOTAL(wait_s), awaited, MAX(awaited_s), CAST(AVG(memory) AS INTEGER)
               FROM (SELECT *, CAST((time_s - ?1) / ?3 AS INTEGER) AS bin FROM activity
                     WHERE time_s > ?1 AND time_s <= ?2)
               GROUP BY bin, node ORDER BY bin""",
            start_s, stop_s, bin_s,
        )  # fmt: skip
        return [_row(ActivityRow, values) for values in found]

    def copying(self) -> float:
        """Which part of their time shards have waited for their backups, 0 to 1, in a run that has such."""
        found = self._query(
            "SELECT TOTAL(copied_s) / MAX(1e-9, TOTAL(seconds)) FROM activity WHERE node LIKE 'shard-%'"
        )
        return float(found[0][0]) if found else 0.0

    def end_s(self) -> float:
        """Training time of the last report."""
        found = self._query("SELECT COALESCE(MAX(time_s), 0) FROM progress")
        return float(found[0][0]) if found else 0.0

    def lease_sums(self) -> tuple[int, int, int]:
        """Examples of the leases that have ended, those of them that were trained, and those given back."""
        query = "SELECT TOTAL(stop - start), TOTAL(trained_stop - start), TOTAL(stop - trained_stop) FROM lease"
        found = self._query(query)
        dealt, trained, returned = map(int, found[0]) if found else (0, 0, 0)
        return dealt, trained, returned

    def parts(self) -> list[PartRow]:
        """What each part of each replica did, over the whole run."""
        found = self._query(
            """SELECT MAX(time_s), replica, part, TOTAL(compute_s), TOTAL(wait_s), TOTAL(bubble_s), MAX(memory)
               FROM part GROUP BY replica, part ORDER BY replica, part"""
        )
        return [_row(PartRow, values) for values in found]

    def extras(self, bin_s: float = math.inf) -> dict[str, list[tuple[float, float]]]:
        """What losses returned beside themselves: name -> (time_s, mean of all replicas), by bins."""
        found = self._query(
            """SELECT name, MAX(time_s), SUM(value * examples) / SUM(CASE WHEN value IS NULL THEN 0.0 ELSE examples END)
               FROM extra GROUP BY name, CAST(time_s / ? AS INTEGER) ORDER BY 2""",
            bin_s,
        )
        curves: dict[str, list[tuple[float, float]]] = {}
        for name, time_s, value in found:
            curves.setdefault(name, []).append((time_s, math.nan if value is None else value))
        return curves

    def staleness(self) -> list[StalenessRow]:
        """Each replica's pushes by staleness, over the whole run."""
        found = self._query(
            """SELECT MAX(time_s), replica, staleness, SUM(count)
               FROM staleness GROUP BY replica, staleness ORDER BY replica, staleness"""
        )
        return [_row(StalenessRow, values) for values in found]

    def _query(self, sql: str, *values: float) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            if "no such table" in str(error):  # the writer has created the file and not yet its tables
                return []
            raise record_error("read", self.path, error) from error


def _row(table: type[R], values: tuple[Any, ...]) -> R:
    # Only what was NaN is NULL in the file.
    columns: list[Any] = [math.nan if value is None else value for value in values]
    return table(*columns)
