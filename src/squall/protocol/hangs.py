"""Who hangs: by what a nursery sees of its processes, now and then, and by how long they usually take for a step.

A process that waits for others never hangs, however long it waits: whom it waits for may. One that is stopped
(SIGSTOP) says nothing whatever it does. One that a debugger holds, or that waits for a disk, is not to be killed: the
one is looked at, and the other could not end before the disk answers, and then it need not. The time in which the
nursery stood still itself is held against nobody, and a step over which it did so tells nothing of what steps take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from squall.protocol.nodes import Node

HANG_AFTER_S = 30.0  # as far as nobody has set it: batches of another shape are compiled again
FIRST_STEPS = 2  # compile, and download
TIMES = 10.0  # as long as a step usually takes; and for the first steps, and for what is no step, as long as else
FORGIVEN = 100  # steps of a process, behind which its slot has no more patience than others
DECAY = 0.98  # of the longest step, from one to the next
ABSENT_S = 1.0  # between two looks: the nursery, which looks four times a second, stood still

Work = Literal["none", "step", "other"]  # none: it waits for others, or what it does is a user's loop
State = Literal["runs", "stopped", "traced", "disk"]


class Sight(msgspec.Struct, frozen=True):
    """What a look shows of a process."""

    node: Node
    moved: float  # changes with whatever it does
    work: Work = "none"
    steps: float = 0  # that it has begun
    state: State = "runs"


class Hung(msgspec.Struct, frozen=True):
    """To be killed, for it has stood still for so long."""

    node: Node
    why: str
    stood_s: float


class Stuck(msgspec.Struct, frozen=True):
    """It waits for a disk, which nobody here can help."""

    node: Node
    why: str


@dataclass(frozen=True)
class _Seen:
    sight: Sight
    at: float  # when it moved last; the time that does not count is added
    since: float  # when it came into its state
    whole: bool  # what it does is seen from its beginning on, at every look


class Hangs:
    """Of one nursery's processes."""

    def __init__(self) -> None:
        self._seen: dict[Node, _Seen] = {}
        self._usual: dict[tuple[str, int], float] = {}  # slot -> the longest step, in seconds; older ones count less
        self._patience: dict[tuple[str, int], float] = {}  # slot -> doubled each time: it may have been too short
        self._looked_at = 0.0
        self._condemned: dict[Node, Hung] = {}

    def look(self, sights: Iterable[Sight], after_s: float, now: float) -> list[Hung | Stuck]:
        """What is to be done about whom, told once. Nobody hangs before `after_s`."""
        passed, self._looked_at = now - self._looked_at, now
        absent = passed > ABSENT_S
        before, self._seen = self._seen, {}
        found: list[Hung | Stuck] = []
        for sight in sights:
            seen = self._see(before.get(sight.node), sight, now, passed, absent)
            self._seen[sight.node] = seen
            if sight.node not in self._condemned:
                found += self._judge(seen, now, passed, after_s)
        return found

    def ended(self, node: Node) -> Hung | None:
        """The process is gone; how it hung, if that is why."""
        self._seen.pop(node, None)
        return self._condemned.pop(node, None)

    def _see(self, before: _Seen | None, sight: Sight, now: float, passed: float, absent: bool) -> _Seen:
        if before is None:
            return _Seen(sight, now, now, whole=False)
        at, since, then, whole = before.at, before.since, before.sight, before.whole and not absent
        if (sight.moved, sight.work) != (then.moved, then.work):
            if then.work == "step":
                slot = _slot(sight.node)
                if whole:
                    self._usual[slot] = max(now - at, DECAY * self._usual.get(slot, 0.0))
                if sight.steps > FORGIVEN:
                    self._patience.pop(slot, None)
            at, whole = now, not absent
        elif absent or sight.state != "runs":
            at += passed
        if sight.state != then.state:
            since = now
        elif absent:
            since += passed
        return _Seen(sight, at, since, whole)

    def _judge(self, seen: _Seen, now: float, passed: float, after_s: float) -> list[Hung | Stuck]:
        sight, in_state_s, still_s = seen.sight, now - seen.since, now - seen.at
        slot = _slot(sight.node)
        match sight.state:
            case "stopped" if in_state_s >= after_s:
                return [self._condemn(sight.node, f"it was stopped for {in_state_s:.3g} s", in_state_s)]
            case "disk" if in_state_s >= after_s > in_state_s - passed:
                return [Stuck(sight.node, f"has waited for a disk for {in_state_s:.3g} s, and cannot be killed")]
            case "runs" if sight.work != "none":
                usual_s = self._usual.get(slot, 0.0)
                limit_s = max(after_s, TIMES * usual_s) * self._patience.get(slot, 1.0)
                first = sight.work == "other" or sight.steps <= FIRST_STEPS or slot not in self._usual
                if still_s >= (max(limit_s, TIMES * after_s) if first else limit_s):
                    self._patience[slot] = 2 * self._patience.get(slot, 1.0)
                    usual = f", and usually takes {usual_s:.2g} s at most" if usual_s else ""
                    return [self._condemn(sight.node, f"it made no step for {still_s:.3g} s{usual}", still_s)]
        return []

    def _condemn(self, node: Node, how: str, stood_s: float) -> Hung:
        self._condemned[node] = hung = Hung(node, f"it hung: {how}, and was killed", stood_s)
        return hung


def _slot(node: Node) -> tuple[str, int]:
    return node.role, node.index
