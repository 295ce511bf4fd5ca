"""What comes of a replay."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from squall.replaying.findings import Difference
from squall.replaying.nonfinite import NonFiniteBatch


@dataclass
class Replayed:
    """What came of a replay; `str()` is for people, `to_json_dict()` for programs.

    Attributes:
        directory: of the run.
        model: with the weights that were reached, on the CPU, in evaluation mode; with `around_nan`, as the replica
            had it.
        updates: that these weights are behind (of the slowest shard, if the schedule broke off).
        versions: the same, by shard.
        elsewhere: what is different here from where the run was recorded: the bits of the results may be, too.
        stopped: why the replay ends before the run did; empty if it does not.
        fingerprints: updates compared with the record.
        snapshots: numbers of those compared, bit for bit.
        difference: the first, if one was found.
        nan: the first batch whose gradient was not finite, if that was asked for and there was one.
        around_nan: that was asked for.
        snapshot: that the replay began at; None: where the run did.
        since: updates that were in it.
        passed: why the replay does not begin sooner, where something that was kept is damaged.
        seconds: that the replay took.
        checked: it was compared with the record.
        until: the update that was to be reached, if one was named.
        strayed: a replica's script did something else than in the run, or its process was lost.
    """

    directory: Path
    model: nn.Module = field(repr=False)
    updates: int
    versions: tuple[int, ...]
    elsewhere: tuple[str, ...]
    stopped: str
    fingerprints: int
    snapshots: tuple[int, ...]
    difference: Difference | None
    nan: NonFiniteBatch | None
    seconds: float
    checked: bool
    until: int | None
    strayed: bool = False
    around_nan: bool = False
    snapshot: int | None = None
    since: int = 0
    passed: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.directory}: {self.updates - self.since} updates replayed in {self.seconds:.1f} s"]
        if self.snapshot is not None:
            lines[0] += f", from snapshot {self.snapshot} (update {self.since:,}) on"
        lines += [f"it cannot begin sooner: {why}" for why in self.passed]
        lines += [f"elsewhere: {difference}; the results may differ" for difference in self.elsewhere]
        if self.stopped:
            lines.append(f"stopped: {self.stopped}")
        if self.nan is not None:
            lines.append(str(self.nan))
        elif self.around_nan:
            lines.append("no batch made a NaN or Inf")
        if self.difference is not None:
            lines.append(f"first difference: {self.difference}")
        elif self.checked:
            lines.append(self._compared())
        return "\n".join(lines)

    @property
    def as_asked(self) -> bool:
        """Nothing differs, and what was to be compared or reached was."""
        if self.difference is not None or self.strayed:
            return False
        if self.checked and not self.fingerprints:
            return False
        return not (self.stopped and (self.checked or self.until is not None))

    def _compared(self) -> str:
        """What a check without a difference says."""
        which = f"snapshot {', '.join(map(str, self.snapshots))}" if self.snapshots else "no snapshot"
        compared = f"{self.fingerprints} updates and {which} compared"
        if not self.fingerprints:
            return "no update was compared"
        if not self.stopped:
            return f"the same, bit for bit: {compared}"
        if not self.updates:
            return f"no update of every shard was reached: {compared}, without a difference"
        return f"the same up to update {self.updates}: {compared}"

    def to_json_dict(self) -> dict[str, Any]:
        """Plain values, without the model."""
        nan = None
        if self.nan is not None:
            names = ("replica", "epoch", "start", "stop", "loss", "parameters", "module", "inputs_finite")
            nan = {name: getattr(self.nan, name) for name in names}
        document = {
            "run_directory": self.directory, "updates": self.updates, "versions": self.versions,
            "elsewhere": self.elsewhere, "stopped": self.stopped, "fingerprints": self.fingerprints,
            "snapshots": self.snapshots, "snapshot": self.snapshot, "since": self.since,
            "passed": self.passed, "difference": self.difference, "nan": nan, "seconds": self.seconds,
        }  # fmt: skip
        plain: dict[str, Any] = json.loads(msgspec.json.encode(document, enc_hook=str))
        return plain
