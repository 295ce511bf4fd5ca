"""What Ray starts on a node of its cluster: `squall join` as a process of its own, which the actor watches.

A nursery forks, so it must be free of threads, and an actor's process is full of them.
"""

from __future__ import annotations

import os
import subprocess
import sys

from squall.runtime.processes import ending

WAIT_S = 600  # that a run may take from asking for its machines to letting them in


class MachineActor:
    """A machine of the run. Ray's dashboard has its name, and in its log what the nursery and its processes write."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        """Ray puts it before each line that it shows of the log."""
        return f"machine {self._number}"

    def join(self, head: str, token: str, cores: int) -> str:
        """Take part in the run until that has ended; returns how `squall join` ended, "" if well."""
        arguments = ["join", head, "--cores", str(cores), "--number", str(self._number), "--wait", str(WAIT_S)]
        process = subprocess.Popen(
            [sys.executable, "-c", _ENTRY, str(os.getpid()), *arguments], env={**os.environ, "SQUALL_TOKEN": token}
        )
        status = process.wait()
        return ending(status) if status else ""


# It dies with the actor, and the nursery leaves the run when its `squall join` is gone.
_ENTRY = (
    "import sys; from squall.runtime.processes import die_with_parent; die_with_parent(int(sys.argv.pop(1)));"
    " from squall.__main__ import entry; entry()"
)
