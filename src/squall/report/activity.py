"""What processes do now, in a few words."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

from squall.protocol.nodes import Node
from squall.record.rows import ActivityRow
from squall.report.words import percent

NOW_S = 2.0  # training time; what somebody does is a mean over it
LEAST = 0.05  # shares of the time that are worth a word
_WORDS = {"compute_s": "computing", "apply_s": "applying", "send_s": "sending", "wait_s": "waiting"}


class Activity:
    """The last rows of each process that there are, by its place, such as "shard 1"."""

    def __init__(self) -> None:
        self._rows: dict[str, deque[ActivityRow]] = {}

    def take(self, row: ActivityRow) -> None:
        node = Node.parse(row.node)
        rows = self._rows.setdefault(f"{node.role} {node.index}", deque())
        rows.append(row)
        while rows[0].time_s < row.time_s - NOW_S:
            rows.popleft()

    def now(self, place: str) -> str:
        """What takes most of its time, and for whom it waits; "" where nothing is known."""
        rows = self._rows.get(place)
        return in_words(rows) if rows else ""


def in_words(rows: Collection[ActivityRow]) -> str:
    seconds = sum(row.seconds for row in rows) or 1.0
    name = max(_WORDS, key=lambda name: sum(getattr(row, name) for row in rows))
    share = sum(getattr(row, name) for row in rows) / seconds
    waited: dict[str, float] = defaultdict(float)
    for row in rows:
        waited[row.awaited] += row.awaited_s
    awaited, waited_s = max(waited.items(), key=lambda each: each[1])
    if share < LEAST / 10:
        return "rests"
    text = f"{_WORDS[name]} {percent(share, 1)}"
    if not awaited or waited_s / seconds < LEAST:
        return text
    whom = awaited if awaited.startswith(("replica", "shard")) else awaited.split()[0]  # of the others there is one
    return f"{text} for {whom}" if name == "wait_s" else f"{text}, waiting {percent(waited_s, seconds)} for {whom}"
