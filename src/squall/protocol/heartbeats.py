"""Who was heard last when, and who has been silent for too long."""

from __future__ import annotations

import msgspec

from squall.protocol.nodes import Node


class Pulse(msgspec.Struct, frozen=True):
    """Between nurseries and the coordinator, in seconds. On one machine there is none: the kernel tells who has died.

    A nursery waits `PATIENCE` times as long for the coordinator as the coordinator waits for it.
    """

    every_s: float = 1.0
    lost_after_s: float = 10.0


BEGIN_WITHIN_S = 10.0  # beyond those limits, for who has to start on a machine where everybody does
PATIENCE = 15.0  # so that a machine which is cut off is still there when it could be heard in time


class Heartbeats:
    """Of others, as somebody hears them who may stand still as well: that time is not held against them."""

    def __init__(self, every_s: float, limit_s: float) -> None:
        self.wake_at: float | None = None  # when `silent` is to be asked next
        self.limit_s = limit_s
        self._every_s = every_s
        # When it was heard or seen last, for how much longer it may be silent, and when it was heard last.
        self._heard: dict[Node, tuple[float, float, float]] = {}

    def heard(self, node: Node, now: float, grace_s: float = 0.0) -> None:
        """Of somebody who is listened for from now on, if that was not so before; it may take so much longer."""
        self._heard[node] = now, grace_s, now
        if self.wake_at is None:
            self.wake_at = now + self._every_s

    def signed(self, node: Node, now: float) -> None:
        """Others say that somebody is there, who is listened for already, if so.

        They are believed for as long as he would wait to hear anything.
        """
        if node not in self._heard:
            return
        at, grace_s, said_at = self._heard[node]
        if now - said_at < PATIENCE * self.limit_s:
            self._heard[node] = now, max(0.0, at + grace_s - now), said_at

    def quiet_s(self, node: Node, now: float) -> float:
        """How long it is since the node was heard, or seen."""
        return now - self._heard[node][0] if node in self._heard else 0.0

    def forget(self, node: Node) -> None:
        self._heard.pop(node, None)
        if not self._heard:
            self.wake_at = None

    def cease(self) -> None:
        self._heard.clear()
        self.wake_at = None

    def silent(self, now: float) -> dict[Node, float]:
        """Who has not been heard for longer than the limit, and for how long, in seconds.

        The time in which this node stood still does not count.
        """
        if self.wake_at is None or now < self.wake_at:
            return {}
        late_s = now - self.wake_at
        if late_s > self._every_s:
            self._heard = {  # who was heard as soon as this node went on was not silent meanwhile
                node: (min(now, at + late_s), grace_s, min(now, said_at + late_s))
                for node, (at, grace_s, said_at) in self._heard.items()
            }
        self.wake_at = now + self._every_s
        return {node: now - at for node, (at, grace_s, _) in self._heard.items() if now - at >= self.limit_s + grace_s}
