"""The run's one transactional record, ``runs/<name>/run.sqlite``: what is in it.

`squall.record.writer.Record` writes it; `squall.report.Reader` reads it in any other process meanwhile (SQLite's
write-ahead log: neither waits for the other). One frozen dataclass is one table, its fields are the columns; their
docstrings and comments are what docs/record.md shows (`make docs`).

``time_s`` is everywhere *training time*: seconds since the first replica was welcomed, and while replicas trained.
"""

import math
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path

SEVERAL = -1  # instead of a replica's number: a lease that was merged from those of several
KEEP = 2  # snapshots of a run that a resume may go back to; older ones are removed


class RecordError(RuntimeError):
    """The record cannot be written or read; the message says why, and what to do."""


def table_name(row: type) -> str:
    """`MetricRow` -> "metric"."""
    return row.__name__.removesuffix("Row").lower()


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One validation result. Names are ``loss`` and those of `Task.metrics`.

    All but the value is of the moment when the weights that were measured had been fetched.
    """

    time_s: float  # seconds of training
    epoch: int  # whole ones that these examples make
    examples: int  # applied by all shards
    updates: int  # applied by all shards
    name: str  # of the metric
    value: float

    def alike(self) -> str:
        return self.name

    def merged(self, later: "MetricRow") -> "MetricRow":
        """The later row, so that the curve has half as many points."""
        return later


@dataclass(frozen=True, slots=True)
class ProgressRow:
    """What one replica did since its last report; `loss` is the mean training loss per example in it."""

    time_s: float  # seconds of training
    replica: int
    examples: int  # since its last report, as all that follows
    batches: int
    loss: float  # NULL: not known, or NaN
    compute_s: float  # seconds
    wait_s: float  # seconds, for shards, for other replicas, for data to be dealt
    pushed_bytes: int
    fetched_bytes: int
    clock: int = 0  # the replica's: exchanges with a push, or rounds, so far

    def alike(self) -> int:
        return self.replica

    def merged(self, later: "ProgressRow") -> "ProgressRow":
        known = [row for row in (self, later) if row.examples and not math.isnan(row.loss)]
        examples = sum(row.examples for row in known)
        sums = ("examples", "batches", "compute_s", "wait_s", "pushed_bytes", "fetched_bytes")
        return replace(
            later,
            loss=sum(row.loss * row.examples for row in known) / examples if known else math.nan,
            **{name: getattr(self, name) + getattr(later, name) for name in sums},
        )


@dataclass(frozen=True, slots=True)
class PartRow:
    """What one process of a replica of several did since its last report. The times add up to the replica's work.

    One of them may be below 0: what a report before it had too much of.
    """

    time_s: float  # seconds of training
    replica: int
    part: int
    compute_s: float  # seconds
    wait_s: float  # seconds, for other parts, and for what came from them
    bubble_s: float  # seconds, the rest of the time in which a pipeline's schedule ran: it had no microbatch
    memory: int  # bytes of its own, the most that was seen; 0: nobody has looked yet

    def alike(self) -> tuple[int, int]:
        return self.replica, self.part

    def merged(self, later: "PartRow") -> "PartRow":
        times = {name: getattr(self, name) + getattr(later, name) for name in ("compute_s", "wait_s", "bubble_s")}
        return replace(later, memory=max(self.memory, later.memory), **times)


@dataclass(frozen=True, slots=True)
class ActivityRow:
    """What a process has done with some seconds. What they do not add up to is its work on messages, or rest."""

    time_s: float  # seconds, at their end
    machine: int  # that it is on
    node: str  # role-index.incarnation
    seconds: float  # how many
    compute_s: float  # seconds
    apply_s: float  # seconds
    send_s: float  # seconds, bringing numbers to their places, or on their way
    wait_s: float  # seconds
    awaited: str  # whom it has waited for longest, such as "shard 1"; "": nobody
    awaited_s: float  # seconds of these
    memory: int  # bytes of its own
    copied_s: float = 0.0  # seconds of wait_s, for its backup

    def alike(self) -> str:
        return self.node

    def merged(self, later: "ActivityRow") -> "ActivityRow":
        names = ("seconds", "compute_s", "apply_s", "send_s", "wait_s", "copied_s")
        sums = {name: getattr(self, name) + getattr(later, name) for name in names}
        longer = max(self, later, key=lambda row: row.awaited_s)
        if self.awaited == later.awaited:
            longer = replace(longer, awaited_s=self.awaited_s + later.awaited_s)
        return replace(
            later, awaited=longer.awaited, awaited_s=longer.awaited_s, memory=max(self.memory, later.memory), **sums
        )


@dataclass(frozen=True, slots=True)
class ExtraRow:
    """What `Task.loss` returned beside the loss: its mean over the examples of a replica since its last report."""

    time_s: float  # seconds of training
    replica: int
    examples: int  # of which this is the mean
    name: str
    value: float

    def alike(self) -> tuple[int, str]:
        return self.replica, self.name

    def merged(self, later: "ExtraRow") -> "ExtraRow":
        examples = self.examples + later.examples
        mean = (self.value * self.examples + later.value * later.examples) / examples
        return replace(later, examples=examples, value=mean)


@dataclass(frozen=True, slots=True)
class StalenessRow:
    """How many of a replica's pushes were applied with this staleness since its last report."""

    time_s: float  # seconds of training
    replica: int
    staleness: int  # updates
    count: int  # pushes

    def alike(self) -> tuple[int, int]:
        return self.replica, self.staleness

    def merged(self, later: "StalenessRow") -> "StalenessRow":
        return replace(later, count=self.count + later.count)


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease that ended: ``[start, trained_stop)`` of the epoch's order was trained, the rest given back.

    Or several that were trained as a whole and follow on each other, under the number of one of them. Then positions
    may run on into the next epochs: with 100 examples an epoch, 250 is position 50 of the second epoch after `epoch`.
    """

    lease: int  # its number
    epoch: int
    start: int  # positions in the epoch's order
    stop: int
    replica: int  # or -1, several
    incarnation: int  # which process in the replica's place, from 0
    granted_s: float  # seconds of training, as all times
    ended_s: float
    trained_stop: int


@dataclass(frozen=True, slots=True)
class SkipRow:
    """Examples ``[start, stop)`` of the epoch's order were left out: by a script, or since they gave NaN or Inf twice.

    It came to that if the lease was trained beyond them; else they were dealt again, in another lease.
    """

    lease: int
    epoch: int
    start: int  # positions in the epoch's order
    stop: int
    replica: int
    why: str = ""  # nonfinite; empty: a script's own reasons


@dataclass(frozen=True, slots=True)
class LossRow:
    """A shard lost examples ``[start, stop)`` of the epoch's order that it had applied, as it died inside an update.

    They are trained again: its copy of its numbers, to which it went back, was older.
    """

    time_s: float  # seconds of training
    shard: int
    epoch: int
    start: int  # positions in the epoch's order
    stop: int


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A process came or went."""

    node: str  # role, number and incarnation: replica-1.0
    pid: int  # 0: not known
    time_s: float  # seconds of training
    change: str  # joined, lost, left
    why: str  # in words, of a loss


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened to the run, in words for people."""

    time_s: float  # seconds of training
    # started, joined, lost, replaced, restarted, left, leaves, snapshot, nonfinite, diverged, warning, best, reached,
    # stopped, finished, error
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class StateRow:
    """One fact about the whole run; writing a key again replaces its value. Empty: there is none.

    - `strategy`, `optimizer` (in words, with its rate), `replicas`, `shards`
    - `epochs`, `steps`, `seconds`: what ends the run; `examples_per_epoch`
    - `status`: running, finished, interrupted, nonfinite, failed, moved
    - `ended`: why it is over (data, steps, seconds, reached, patience, method, script, stopped, failed); `reason`: the
      same in words
    - `training_s`: seconds of training, once it is over; `updates`: applied by all shards, as of the newest snapshot
    - `began_at`: seconds since 1970, less what was trained before: training time counts from there
    - `first_step_s`: seconds from the command to the first training step
    - `snapshot`: number of the newest whose rows are all here; older ones' are, too
    - `evaluating`: number of the evaluation under way
    - `keep_best`: the metric whose best weights are kept
    - `diverged`: what is wrong with the loss, if something is; `first_loss`: what it is compared with
    - `found`: examples that a prediction, whose `optimizer` is empty, had answers for when it began
    - `counted`: what leases count, "example" or (of a sampler's order) "position"
    - `batch`: examples of each evaluation, where the method looks at batches as a whole and deals no leases
    - `bubble`: the share of its time that a part of a pipeline has no microbatch, at the least: of equal stages
    - `shard_bytes` (JSON): of an exchange with the shards, what each of them has part in
    - `inventory`, `traffic`, `links` (JSON): what runs on which machine; bytes that each has sent and received; from
      which, to which, and how many
    - `copies` of each shard; `copied`: bytes of these that went on to backups
    - `pauses` (JSON): seconds without training as the run moved, and why; `moved_at`: when, in seconds since 1970
    """

    key: str
    value: str


Row = (
    MetricRow | ProgressRow | PartRow | ActivityRow | ExtraRow | StalenessRow | LeaseRow | SkipRow | LossRow | MemberRow
    | EventRow | StateRow
)  # fmt: skip

_REMEDY = {
    sqlite3.SQLITE_BUSY: "another process holds it: is this run already being trained, or open in another program?",
    sqlite3.SQLITE_FULL: "free some space on its disk, then resume the run",
    sqlite3.SQLITE_IOERR: "the disk is failing, or a limit on file size was met",
    sqlite3.SQLITE_READONLY: "give this user the right to write to it and to its folder",
    sqlite3.SQLITE_CANTOPEN: "check that its folder exists and may be written to",
    sqlite3.SQLITE_CORRUPT: "it is damaged: restore it from a copy or start a new run",
    sqlite3.SQLITE_NOTADB: "it is no record of a run: move it away, and a resume begins anew, and audits from there",
}


def record_error(doing: str, path: Path, cause: sqlite3.Error) -> RecordError:
    """An error of SQLite as a `RecordError`: what was done, to which file, and the remedy where one is known."""
    # The low byte of an extended result code is the primary one (sqlite.org/rescode.html).
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    remedy = f"; {_REMEDY[code]}" if code in _REMEDY else ""
    return RecordError(f"cannot {doing} {path}: {cause}{remedy}")
