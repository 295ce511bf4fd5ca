"""The coordinator's backup on another machine, which goes on in its place if most machines follow it.

It takes what the coordinator has taken (`protocol.backup`), so it knows which machines there are, and notices when that
falls silent. Then it asks each machine's nursery to follow it. A nursery does so, for ever, where it hears nothing of
the coordinator either, unless it has promised that one never to. So of the machines that there were as the deputy began
either more than half follow it, or half at least stay with the coordinator, and never both: one of them goes on (a
majority in a view, as in Oki and Liskov, "Viewstamped replication", 1988; at a tie the side with the coordinator).

A deputy that has asked and hears the coordinator again ends, since votes are for ever, and another begins: who stood
still once would else be followed later, by the votes of that time.

Where it finds no majority nobody may train on. Then it has the run stopped, and goes on for as long as it takes to save
what the machines have that follow it.
"""

from __future__ import annotations

from typing import Any

from squall.protocol.backup import Backup
from squall.protocol.effects import Effect, End, Forget, Send
from squall.protocol.epoch_messages import Follow, Voted
from squall.protocol.events import Event, MessageArrived, StopRequested, TimePassed
from squall.protocol.heartbeats import Heartbeats, Pulse
from squall.protocol.machine import Refusal
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import StartProcess

FIRST_LOST = "the run's first machine was lost"
ALONE_AFTER = 5.0  # times as long as the coordinator may be silent: whom nobody else has followed by then saves


class Deputy:
    def __init__(self, node: Node, machine: int, pid: int = -1, address: str = "", pulse: Pulse | None = None) -> None:
        """On that machine. `address`: where the coordinator will be called if it goes on here."""
        self.node = node
        self._nursery = Node("nursery", machine)
        self._backup = Backup(node, pid, address)
        pulse = pulse or Pulse()
        self._heartbeats = Heartbeats(pulse.every_s, pulse.lost_after_s)  # of the coordinator
        self._alone_after_s = ALONE_AFTER * pulse.lost_after_s
        self._follow: dict[int, None] = {}  # machines
        self._asks: set[int] = set()  # those that are asked
        self._leads = False

    @property
    def wake_at(self) -> float | None:
        times = (self._backup.wake_at, self._heartbeats.wake_at)
        return min((at for at in times if at is not None), default=None)

    def on(self, event: Event, now: float) -> list[Effect]:
        match event:
            case MessageArrived(Node("nursery", machine), Voted(deputy, follows)):
                if deputy != self.node or machine not in self._asks:
                    raise Refusal(f"it answers what it was not asked: {event.message!r}")
                if follows:
                    self._follow[machine] = None
                return self._lead() if self._many else []
            case MessageArrived(sender) if sender == COORDINATOR:
                if self._asks and not self._leads:  # votes are for ever, and this stall is over: another may begin anew
                    return [Forget(COORDINATOR), End("finished")]
                self._heartbeats.heard(COORDINATOR, now)
            case TimePassed() if self._heartbeats.wake_at is not None and now >= self._heartbeats.wake_at:
                effects = self._look(now)
                return [*effects, *self._backup.on(event, now)] if self._backup.wake_at is not None else effects
        return self._backup.on(event, now)

    @property
    def _coordinator(self) -> Any:
        """As this would go on in its place; None: it cannot yet."""
        copied = self._backup.copied
        machine: Any = None if copied is None else copied.machine
        return machine if machine is not None and machine.deputies.whole else None

    @property
    def _many(self) -> bool:
        return 2 * len(self._follow) > len(self._coordinator.deputies.voters)

    def _look(self, now: float) -> list[Effect]:
        silent, coordinator = self._heartbeats.silent(now), self._coordinator
        if not silent or coordinator is None or self._leads or coordinator.deputies.accused:
            return []
        if self._follow and silent[COORDINATOR] >= self._alone_after_s:
            return self._save()
        asked = [machine for machine in coordinator.deputies.voters if machine != coordinator.home]
        self._asks.update(asked)
        return [Send(Node("nursery", machine), Follow(self.node)) for machine in asked]

    def _save(self) -> list[Effect]:
        """Take one event that the coordinator has not: a stop."""
        assert self._backup.copied is not None
        why = f"{FIRST_LOST}, and fewer than half of all machines are here, which alone might train on"
        self._backup.adds(StopRequested(why))
        return self._lead()

    def _lead(self) -> list[Effect]:
        if self._leads:
            return []
        self._leads = True
        start = StartProcess(COORDINATOR, ends=self.node)
        return [Forget(COORDINATOR), Send(self._nursery, start), End("finished")]
