"""When each process of a training has begun its steps, and when one was killed: in files that a benchmark reads."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


class Steps:
    """Those of this process. `folder` is that of all."""

    def __init__(self, folder: Path) -> None:
        self._death = folder / "death"
        self._file = (folder / f"{os.getpid()}.steps").open("a", buffering=1)
        self._count = 0

    def begin(self, dies_in: int = 0) -> None:
        """A step begins; if nobody has died yet, this process does in step number `dies_in`."""
        self._count += 1
        now = time.monotonic()
        if self._count == dies_in and not self._death.exists():
            self._death.write_text(f"{os.getpid()} {now}")
            os.kill(os.getpid(), signal.SIGKILL)
        self._file.write(f"{now}\n")

    def enough(self, count: int) -> bool:
        """One has died, and this process has begun so many steps."""
        return self._count >= count and self._death.exists()


@dataclass(frozen=True)
class Outage:
    """What the death of a process has cost the others."""

    seconds: float  # from the beginning of the last step before it to the end of the first after it
    whole_after_s: float  # until as many processes as before have made a step
    steps: int  # before it


def outage(folder: Path) -> Outage:
    pid, moment = (folder / "death").read_text().split()
    died = float(moment)
    begun = {path.stem: [float(line) for line in path.read_text().split()] for path in folder.glob("*.steps")}
    before = [times for times in begun.values() if times[0] < died]
    last = min(max(time for time in times if time < died) for times in before)
    # The first step that begins afterwards may be one that is made again: it is over when the second begins.
    after = {name: [time for time in times if time > died] for name, times in begun.items()}
    over = sorted(times[1] for times in after.values() if len(times) > 1)
    assert len(over) >= len(before), f"after the death of {pid} {len(over)} of {len(before)} processes have trained"
    return Outage(
        over[0] - last, over[len(before) - 1] - died, max(sum(time < died for time in times) for times in before)
    )
