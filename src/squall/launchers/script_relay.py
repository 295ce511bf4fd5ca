"""Scripts on other machines, as the head sees them: what they say goes to the nursery here, which judges all, and back.

Behind a training that finished they may take their time, so the nursery here stays until theirs have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from squall.launchers.gathering import Gathering
from squall.launchers.last_weights import in_pieces, newest
from squall.transports.stream import PASS_BYTES


class ScriptRelay:
    def __init__(self, gathering: Gathering, directory: Path) -> None:
        self._own = gathering.machines[0].pipe
        self._gathering = gathering
        self._directory = directory  # of the run
        self._status = ""  # how the training has ended, when it has
        self._ended = False  # the nursery here as well
        self._parcels: dict[int, Iterator[dict[str, Any]]] = {}  # machine -> messages that it gets as it reads them
        self._alone = False  # the nursery was told that no other machine has scripts any more

    def hear(self, machine: int, said: dict[str, Any]) -> bool:
        """Take what a nursery has said; False if it is not for this alone."""
        match said["kind"]:
            case "script" if machine:
                self._tell_own(**said, machine=machine)
            case "data" if not machine:
                self._gathering.announce(said)
            case "trained" if not machine:
                self.over(said["status"], said["reason"])
            case "noted" if not machine:
                if said["machine"] in self._gathering.machines:
                    self._gathering.machines[said["machine"]].pipe.say(**said)
            case "exited" if machine:
                self._tell_own(kind="exited", machine=machine, node=said["node"], pid=said["pid"], why=said["why"])
                return False
            case _:
                return False
        return True

    def lose(self, machine: int, ended: bool) -> None:
        """Its connection is over; `ended`: when it had said all, which nobody should before the run's end."""
        self._parcels.pop(machine, None)
        if not (ended and self._status):
            self._tell_own(kind="gone", machine=machine)

    def _tell_own(self, **said: Any) -> None:
        """The nursery here, from when the run begins to its end: before and after it listens to nothing of this."""
        if self._gathering.over and not self._ended:
            self._own.say(**said)

    def ended(self, status: str, reason: str) -> None:
        """All has ended here."""
        self._ended = True
        self.over(status, reason)

    def over(self, status: str, reason: str) -> None:
        """The training has ended, or the scripts have after it: the other machines are told, once, with the weights."""
        if status == self._status:
            return
        weights = None
        if not self._status and status != "moved":
            self._gathering.shut(status, reason)
            weights = self._last(status) if len(self._gathering.machines) > 1 else None
        self._status = status
        end = {"kind": "end", "status": status, "reason": reason}
        for machine in self._gathering.machines:
            if machine:
                self._parcels[machine] = chain(in_pieces(weights) if weights is not None else (), [end])
        self._send()

    def _last(self, status: str) -> Tensor | None:
        """The weights that scripts elsewhere go on with. A user's stop waits for no more than goes at once."""
        weights = newest(self._directory) if status in ("finished", "interrupted") else None
        late = weights is not None and status == "interrupted" and weights.nbytes > PASS_BYTES
        return None if late else weights

    def turn(self, collected: bool) -> None:
        """`collected`: all other machines have ended."""
        self._send()
        if self._status and collected and not self._alone:
            self._alone = True
            self._tell_own(kind="alone")

    def _send(self) -> None:
        """What goes without waiting."""
        for machine, parcel in list(self._parcels.items()):
            pipe = self._gathering.machines[machine].pipe
            while pipe.connection.unsent < PASS_BYTES:
                message = next(parcel, None)
                if message is None:
                    del self._parcels[machine]
                    break
                pipe.say(**message)
