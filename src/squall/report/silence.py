"""Which replicas have been silent for how long, on the viewer's clock: the record's stands still when all hang."""

from __future__ import annotations

from collections.abc import Mapping

SILENT_S = 10.0  # and longer where a replica's reports lie further apart


class Silence:
    def __init__(self) -> None:
        self._heard: dict[int, tuple[float, float]] = {}  # replica -> time of its last report, and when it was seen
        self._longest: dict[int, float] = {}  # seconds between two of its reports
        self._asked = "", 0.0  # the evaluation under way, and when it was first seen
        self._slowest_s = 0.0  # of the evaluations so far

    def told(self, reports: Mapping[int, float], evaluating: str, now: float) -> str:
        """In words; empty when nobody is silent.

        `reports` has the time of each living replica's last, `evaluating` names the evaluation under way, if there is
        one.
        """
        before, asked_at = self._asked
        if evaluating != before:
            self._slowest_s = max(self._slowest_s, now - asked_at if before else 0.0)
            self._asked = evaluating, now
        asked_s = now - self._asked[1] if evaluating else 0.0
        late = asked_s >= max(SILENT_S, 2 * self._slowest_s)
        evaluator = f"the evaluator has not answered for {asked_s:.0f} s" if late else ""
        return "; ".join(filter(None, [self._replicas(reports, now), evaluator]))

    def _replicas(self, reports: Mapping[int, float], now: float) -> str:
        silent = []
        for replica, report in sorted(reports.items()):
            known, seen_at = self._heard.get(replica, (report, now))
            if known != report:
                self._longest[replica] = max(self._longest.get(replica, 0.0), now - seen_at)
                seen_at = now
            self._heard[replica] = report, seen_at
            if now - seen_at >= max(SILENT_S, 2 * self._longest.get(replica, 0.0)):
                silent.append(f"replica {replica} for {now - seen_at:.0f} s")
        if not silent:
            return ""
        unwritten = "" if len(silent) < len(reports) else " (or the record cannot be written)"
        return f"not heard of: {', '.join(silent)}{unwritten}"
