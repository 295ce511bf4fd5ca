"""What processes of a run have ended before their work was done, and what it means for the run."""

from __future__ import annotations

from typing import Any

from squall.errors import ProcessLost, SquallError, TaskError
from squall.protocol.nodes import COORDINATOR, Node
from squall.record.rows import RecordError
from squall.usercode.blame import decode

FAR_AT_MOST = 16  # of other machines' processes: the first is told


class Exits:
    """As the nurseries tell them ("exited"), in that order."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def add_far(self, told: dict[str, Any], machine: int) -> None:
        others = [known for known in self.told if "machine" in known]
        first = bool(told["traceback"]) and not any(known["traceback"] for known in others)  # it says why all ends
        if first or len(others) < FAR_AT_MOST:
            self.told.append({**told, "machine": machine})

    def lost(self, status: str, reason: str) -> str:
        """Who was lost and not succeeded, in words, if it is that which has ended the run."""
        if raised := [each["traceback"] for each in self.told if each["traceback"]]:
            return _unsucceeded(raised[0])
        losses = [(Node.parse(loss["node"]), loss) for loss in reversed(self.told)]  # most were succeeded
        for node, loss in sorted(losses, key=lambda each: each[0] != COORDINATOR):  # without it nobody is
            name = node.role if node == COORDINATOR else f"{node.role} {node.index}"
            if (node == COORDINATOR and not status) or (node.role == "shard" and _ends(f"{name} ", status, reason)):
                return f"{name} (pid {loss['pid']}) was lost: {loss['why']}"
        return reason if _ends("shard", status, reason) else ""  # one that was killed, as it hung

    def blame(self) -> None:
        """Raises what the user's code has raised first, or the coordinator."""
        for failure in (each for each in self.told if each["traceback"]):
            if Node.parse(failure["node"]) == COORDINATOR:
                found = decode(failure["traceback"])
                plain = found is not None and found.type == RecordError.__name__ and found.message
                raise SquallError(f"the coordinator failed\n{plain or found}")
            raise TaskError.told(failure["traceback"])


def _ends(name: str, status: str, reason: str) -> bool:
    """That it was lost is why the run has ended."""
    return not status or (status == "failed" and reason.startswith(name) and " was lost" in reason)


def _unsucceeded(told: str) -> str:
    """Why a process could not succeed another, in words; empty where it is something else that it has raised."""
    kind = f"{ProcessLost.__module__}.{ProcessLost.__name__}: "
    found = decode(told)
    message = found.message if found is not None else ""
    return message.removeprefix(kind).partition("\n")[0] if message.startswith(kind) else ""
