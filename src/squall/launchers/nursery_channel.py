"""The coordinator's line to the nursery of its machine, whose end of it is `coordinator_line.PipeLine`."""

from __future__ import annotations

import msgspec

from squall.launchers.control_pipe import ControlPipe
from squall.protocol.effects import End, Payload
from squall.protocol.events import Event, FrameArrived, StopRequested
from squall.protocol.frames import Frame
from squall.protocol.nodes import NURSERY, Node


class NurseryChannel:
    """The frames of their link, and what the user is shown."""

    def __init__(self, pipe: ControlPipe, nursery: Node = NURSERY, backed: bool = False) -> None:
        """`backed`: by a deputy, which goes on when this machine's nursery is gone, and all its processes with it."""
        self._pipe = pipe
        self._nursery, self._backed = nursery, backed

    def knows(self, node: Node) -> bool:
        return node == self._nursery

    def send(self, to: Node, frame: Frame, payload: Payload | None) -> None:
        self._pipe.say(kind="frame", frame=frame)

    def admit(self, node: Node, machine: int, address: str = "") -> None:
        """Nobody calls over this. A script's nursery hears of replicas elsewhere, and must know where they are."""
        if node.role == "replica":
            self._pipe.say(kind="placed", replica=node.index, machine=machine)

    def forget(self, node: Node) -> None:
        """Nobody forgets the nursery."""

    def take(self) -> Event | None:
        if not self._pipe.open or not self._pipe.connection.poll():
            return None
        said = self._pipe.hear()
        if said is None:  # the kernel kills this process in a moment; its last word would be the deputy's first
            return None if self._backed else StopRequested("the nursery is gone")
        return FrameArrived(self._nursery, msgspec.convert(said["frame"], Frame))

    def end(self, end: End) -> None:
        self._pipe.say(kind="end", status=end.status, reason=end.reason)

    def saving(self, received: int, total: int) -> None:
        self._pipe.say(kind="saving", received=received, total=total)

    def evaluated(self, number: int, evaluation: dict[str, float]) -> None:
        self._pipe.say(kind="evaluated", number=number, evaluation=evaluation)

    def deputed(self, whole: bool) -> None:
        """A deputy may go on in the coordinator's place, or none any more."""
        self._pipe.say(kind="deputed", deputed=whole)

    def poll(self) -> Event | None:
        return None
