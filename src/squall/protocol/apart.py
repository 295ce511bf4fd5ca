"""Replicas that lie on several machines: what a coordinator does about the processes of their other parts.

The first part is the replica to all others. When it is ready, the nurseries of the others' machines start those, and
they call it. Any of them that dies is the replica's death. Then, and when the replica has left, the rest of its
processes are killed; the next one in its slot starts when all are known to have ended: till then they hold the places,
memory and GPUs that it is to have, and the first part could write into the slot of its machine's arena.
"""

from __future__ import annotations

from collections.abc import Mapping

from squall.protocol import notes
from squall.protocol.effects import Effect, Send
from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import KillProcess, PartPlace, PartsPlaced, Placed, StartProcess
from squall.protocol.placing import Placing

ENDS_WITHIN_S = 10.0  # a process that is killed: after that the user is told of it


class Apart:
    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._tell_at: dict[Node, float] | None = {}  # of processes that are to end, when the user is told; None: never
        self._ending: dict[Node, tuple[int, int]] = {}  # processes that are to end -> their replica's slot, machine

    def first(self, node: Node) -> PartPlace | None:
        """What the replica's own nursery is told as it starts; None where all of it lies together."""
        return PartPlace(node, self._placing.on[node]) if self._placing.apart(node) else None

    def start(self, node: Node, address: str, shards: tuple[Placed, ...]) -> list[Effect]:
        """The first part is ready: the others, if there are any elsewhere, call it, and shards where these are now."""
        if not (apart := self._placing.apart(node)):
            return []
        first = PartPlace(node, self._placing.on[node], address, shards)
        starts = [Send(Node("nursery", at), StartProcess(part, first)) for part, at in apart.items()]
        return [Send(node, PartsPlaced(tuple(PartPlace(part, at) for part, at in apart.items()))), *starts]

    @property
    def wake_at(self) -> float | None:
        return min(self._tell_at.values()) if self._tell_at else None

    def cease(self) -> None:
        """The run is over: nobody waits for room."""
        self._tell_at = None

    def end(self, node: Node, processes: Mapping[Node, int], now: float) -> list[Effect]:
        """The replica is gone, and these processes of it, with their machines, may not be."""
        self._ending |= {process: (node.index, machine) for process, machine in processes.items()}
        if self._tell_at is not None:
            self._tell_at |= dict.fromkeys(processes, now + ENDS_WITHIN_S)
        return [Send(Node("nursery", machine), KillProcess(process)) for process, machine in processes.items()]

    def ended(self, process: Node, machine: int) -> int | None:
        """That machine says that the process has ended. Returns the slot if it was to, as the last one there."""
        slot, at = self._ending.get(process, (None, None))
        if slot is None or at != machine:
            return None
        del self._ending[process]
        if self._tell_at is not None:
            self._tell_at.pop(process, None)
        return None if self.ends(slot) else slot

    def overdue(self, now: float) -> list[Effect]:
        """The user is told once of processes that do not end."""
        late = [process for process, at in (self._tell_at or {}).items() if now >= at]
        return [self._late(process) for process in late]

    def _late(self, process: Node) -> Effect:
        assert self._tell_at is not None
        del self._tell_at[process]
        slot, machine = self._ending[process]
        out = "end `squall join` there (Ctrl-C twice)" if machine else "stop the run and `squall resume` it"
        return notes.Remark(
            "warning",
            f"replica {slot} waits: {process} on machine {machine} was killed {ENDS_WITHIN_S:.0f} s ago and has not"
            f" ended. The kernel may hold it in a device or a file system that does not answer: mend that, or {out}",
        )

    def ends(self, slot: int) -> bool:
        """Processes of the slot may still be there."""
        return any(of == slot for of, _ in self._ending.values())

    def ending_on(self, machine: int) -> list[Node]:
        """Processes of that machine that may still be there."""
        return [process for process, (_, at) in self._ending.items() if at == machine]
