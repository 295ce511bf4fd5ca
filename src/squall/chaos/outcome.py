"""What has become of a run under faults, and whether that is what the run promises."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import UNSET

from squall.chaos.faults import Injury
from squall.errors import SquallError
from squall.record.rows import EventRow, LeaseRow
from squall.report import Audit, Reader, audit
from squall.report.coverage import EpochAudit
from squall.report.words import clock, plural
from squall.runtime.snapshot import Snapshots


@dataclass
class Outcome:
    """Attributes:
    directory: of the run.
    status: of the command that has trained; negative: the signal that has ended it.
    injuries: the faults, in order.
    left: what was there still when the command had ended: processes, and files in its folders for temporary ones.
    ended: the run's own last status, such as "finished"; empty if it has no record.
    audit: None: there is no record.
    examples: trained, also more than once.
    replaced: processes for which others were started.
    dealt_again: examples of leases that came back unfinished.
    unsaved: examples that were trained and are in no snapshot.
    """

    directory: Path
    status: int
    injuries: Sequence[Injury]
    left: Sequence[str]
    ended: str = ""
    audit: Audit | None = None
    examples: int = 0
    replaced: int = 0
    dealt_again: int = 0
    unsaved: int = 0
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.directory / "run.sqlite").exists():
            with closing(Reader(self.directory / "run.sqlite")) as reader:
                self._read(reader)
        self.broken = [
            *(["no fault came about: there was nobody whom one could hit"] if not self.injuries else []),
            *([f"the run has not finished: it is {self.ended or 'not begun'}"] if self.ended != "finished" else []),
            *([f"the command ended with {self.status}"] if self.status and self.ended == "finished" else []),
            *([f"examples are missing: {self.missed:,}"] if self.missed else []),
            *(f"left behind: {name}" for name in self.left),
        ]

    def _read(self, reader: Reader) -> None:
        self.ended = reader.state().get("status", "")
        self.audit = audit(reader)
        self.examples = sum(work.examples for work in reader.progress())
        self.replaced = sum(event.kind == "replaced" for event in reader.rows(EventRow))
        self.dealt_again = sum(lease.stop - lease.trained_stop for lease in reader.rows(LeaseRow))
        self.unsaved = self.examples
        if numbers := Snapshots(self.directory).numbers():
            try:
                saved = Snapshots(self.directory).manifest(numbers[-1]).examples
            except SquallError:
                return
            self.unsaved = max(0, self.examples - min(saved)) if saved is not UNSET else 0

    @property
    def missed(self) -> int:
        """Examples that the run owes."""
        return sum(len(span) * len(part) for part in self._parts for span in part.missed)

    @property
    def repeated(self) -> int:
        """Examples too many."""
        return sum(len(span) * (span.times - 1) * len(part) for part in self._parts for span in part.repeated)

    @property
    def _parts(self) -> Sequence[EpochAudit]:
        return self.audit.parts if self.audit is not None else ()

    def __str__(self) -> str:
        waits = [injury.without_s for injury in self.injuries]
        told = [str(self.audit)] if self.audit is not None else []
        told.append(
            f"{plural(len(self.injuries), 'fault')}, {self.replaced} replaced,"
            f" {self.dealt_again:,} examples dealt again, {self.repeated:,} trained more than once"
        )
        if waits:
            median, worst = map(seconds_in_words, (statistics.median(waits), max(waits)))
            told.append(f"without an update: {median} (median), {worst} (worst)")
        if self.ended not in ("finished", ""):
            told.append(f"in no snapshot: {self.unsaved:,} of {self.examples:,} examples")
        told.append("The promises held." if not self.broken else "NOT as promised: " + "; ".join(self.broken) + ".")
        return "\n".join(told)


def seconds_in_words(seconds: float) -> str:
    if math.isinf(seconds):
        return "the run ended"
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else clock(seconds)
