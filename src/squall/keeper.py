"""Goes on with a run without a terminal whose launching process was killed: a process that does nothing else.

The run's other processes end in order then, with a snapshot, and the keeper becomes a `squall resume`. So neither of
the two stops the run: a keeper that is killed is missed by nobody, and the next launching process has another one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from squall import detaching
from squall.launchers.environment import starts_again
from squall.launchers.leaving import LAUNCHER_GONE
from squall.runtime import running

LOOK_S = 0.1
AGAIN = ("-m", "squall", "resume", "--as-it-was", "--by-itself", "--detach")


def start(directory: Path, launcher: str, snapshot: int, home: str, flags: Sequence[str]) -> int:
    """A keeper for the launching process of this identity. Returns its pid.

    `snapshot` was the newest as that began. The run goes on by a resume with these flags, in the directory `home`; it
    finds the modules that this process finds.
    """
    command = [sys.executable, "-m", "squall.keeper", str(directory.resolve()), launcher, str(snapshot), *flags]
    modules = os.pathsep.join(filter(None, sys.path))
    known = {**os.environ, "PYTHONPATH": modules}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=home, env=known).pid


def keep(directory: Path, launcher: str, snapshot: int, flags: Sequence[str]) -> None:
    """Until the launching process has ended; in the place of one that was killed the run goes on."""
    running.wait_gone(launcher)
    while _killed(directory, launcher) and not running.ended(directory, LOOK_S):
        pass
    if not _killed(directory, launcher):
        return
    from squall.following import recorded_end
    from squall.runtime.snapshot import Snapshots  # which needs torch

    end, newest = recorded_end(directory), max(Snapshots(directory).numbers(), default=0)
    if end.status != "running" and not end.reason.startswith(LAUNCHER_GONE):
        return  # it had ended otherwise
    lost = f"squall: the launching process (pid {launcher.partition(' ')[0]}) was killed"
    if newest == snapshot:  # it would be tried for ever
        sys.stderr.write(f"{lost}, and has left no snapshot of its own: squall resume {directory} goes on\n")
        return
    sys.stderr.write(f"{lost}; going on from snapshot {newest}\n")
    os.execv(sys.executable, [sys.executable, *AGAIN, *flags, str(directory)])


def _killed(directory: Path, launcher: str) -> bool:
    """It has not ended by itself, nobody has asked for its end, and nobody has launched the run anew."""
    last = detaching.detached(directory)
    told = last is None or last.launcher != launcher or last.outcome is not None
    stays = running.launcher(directory) != launcher or running.stopping(directory)
    return not (told or stays) and starts_again(directory)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
