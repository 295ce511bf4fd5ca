"""Goes on with a run without a terminal whose launching process was killed: a process that does nothing else.

The run's other processes end in order then, with a snapshot, and the keeper becomes a `squall resume`. So neither of
the two stops the run: a keeper that is killed is missed by nobody, and the next launching process has another one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from squall import detaching
from squall.launchers.environment import starts_again
from squall.runtime import running

LOOK_S = 0.1
AGAIN = ("-m", "squall", "resume", "--as-it-was", "--detach")


def start(directory: Path, launcher: str, snapshot: int | None) -> int:
    """A keeper for the launching process of this identity; `snapshot` was the newest as it began. Returns the pid."""
    command = [sys.executable, "-m", "squall.keeper", str(directory), launcher, str(snapshot)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL).pid


def keep(directory: Path, launcher: str, snapshot: str) -> None:
    """Until the launching process has ended; in the place of one that was killed the run goes on."""
    running.wait_gone(launcher)
    while not running.ended(directory, LOOK_S):
        pass
    if not _killed(directory, launcher):
        return
    # Each of these needs torch.
    from squall.following import recorded_end
    from squall.launchers.again import Again
    from squall.runtime.snapshot import Snapshots

    new = str(Snapshots(directory).newest()) != snapshot  # else it would be tried for ever
    if new and recorded_end(directory).status in ("interrupted", "running"):
        Again(directory, None, 0).moved(f"the launching process (pid {launcher.partition(' ')[0]}) was killed")
        os.execv(sys.executable, [sys.executable, *AGAIN, str(directory)])


def _killed(directory: Path, launcher: str) -> bool:
    """And nobody has asked for that."""
    last = detaching.detached(directory)
    told = last is None or last.launcher != launcher or last.outcome is not None
    return not told and starts_again(directory) and not running.stopping(directory)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), *sys.argv[2:])
