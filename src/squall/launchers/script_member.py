"""The nursery of a script's run on a machine that has joined: what its scripts say goes to the first one's.

    head -> nursery      "data" that is trained on, "noted" in answer to a script, "weights" of the last snapshot in
                         pieces, and behind them "end"
    nursery -> head      "script" with what one has said

How the training has ended the head says, and not the coordinator, because scripts go on behind it.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from squall.launchers.child import Child
from squall.launchers.last_weights import take_weights
from squall.launchers.member_nursery import MemberNursery
from squall.launchers.nursery import GRACE_S
from squall.launchers.script_forks import ScriptForks
from squall.protocol.effects import Effect, End, KillMembers
from squall.protocol.events import LauncherLost

GONE = "the run's first machine is gone"


class ScriptMember(MemberNursery, ScriptForks):
    """It is there until its scripts have come to their ends, with the last weights of the run."""

    _dismissed = False  # the coordinator has no more to do with this machine

    def _begin(self) -> None:
        ScriptForks._begin(self)  # there is no coordinator yet

    def _hear_script(self, replica: int, said: dict[str, Any]) -> None:
        self._launcher.say(kind="script", replica=replica, said=said)
        if said["kind"] == "logged" and not self._launcher.open:
            self._answer(replica, GONE)

    def _done(self, child: Child) -> None:
        super()._done(child)
        if child.node.role == "replica":
            self._launcher.say(kind="script", replica=child.node.index, said={"kind": "over"})

    def _hear_launcher(self, said: dict[str, Any] | None) -> None:
        match said:
            case {"kind": "data", "data": data}:
                self._connect()
                self._train_on(data)
            case {"kind": "noted", "replica": replica, "error": error}:
                self._answer(replica, error)
            case {"kind": "weights", "data": piece}:
                take_weights(self._job.directory, piece)
            case None:
                self._tell(LauncherLost())
                self._look_for_head()
            case _:
                super()._hear_launcher(said)

    def _leave(self) -> None:
        if self._trained_on is not None and self.end is None:
            super()._leave()
            return
        for child in self._children.values() if self.end is not None else ():
            if child.node.role == "replica":  # its script does not come to its end, as the first machine has to know
                self._lose(child, -signal.SIGINT)
        self._over(End("interrupted", "interrupted there"))

    def _do(self, effect: Effect) -> None:
        """The head says nothing where this machine alone has no more part in the run."""
        if isinstance(effect, End) and effect.status in ("finished", "left"):
            self._dismissed = True
            if self.leaves and self.end is None:
                self._deadline = time.monotonic() + GRACE_S
            self._look_for_head()
        elif self.end is None or not isinstance(effect, KillMembers | End):
            super()._do(effect)

    def _look_for_head(self) -> None:
        """Where the coordinator has no part in this, nobody else has word of the end, or records what scripts log."""
        training = self._trained_on is not None and not self._dismissed and self.end is None
        if not (self._launcher.open or training):
            self._over(End("failed", GONE))

    def _late(self) -> None:
        if self.end is None:
            MemberNursery._over(self, End("left"))
            self._end_scripts("interrupted", f"machine {self._machine} has left the run")
        else:
            super()._late()

    def _over(self, end: End) -> None:
        super()._over(end)
        self._deadline = None  # behind a training that finished
        self._end_scripts(end.status, end.reason)
