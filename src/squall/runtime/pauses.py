"""How long a run stands still as it moves: it ends in order on some machines, and begins again on others."""

from __future__ import annotations

import time

import msgspec

from squall.record.writer import Record
from squall.runtime.job import Job

FACT = "pauses"  # of the record
Pause = tuple[float, str]  # seconds, and why


class Pauses:
    """Of a run, with the one that ends now if there is one."""

    def __init__(self, record: Record, job: Job) -> None:
        since = record.fact("moved_at") if job.restored is not None and record.fact("status") == "moved" else None
        self._since = float(since) if since is not None else 0.0
        self.moved = self._since > job.commanded_at  # else a user has resumed it, some time later
        self._why = record.fact("reason") or ""
        self._before = msgspec.json.decode(record.fact(FACT) or "[]", type=list[Pause]) if self.moved else []

    @staticmethod
    def begins(ago_s: float) -> dict[str, object]:
        """What the record has to know of a run that moves, and whose training ended so long ago."""
        return {"moved_at": time.time() - ago_s}

    def ends(self) -> tuple[dict[str, object], str]:
        """What the record has to know when training begins, and the same in words."""
        if not self.moved:
            return {}, ""
        seconds = time.time() - self._since
        found = msgspec.json.encode([*self._before, (seconds, self._why)]).decode()
        return {FACT: found}, f"started again after {seconds:.1f} s"
