"""How a run's processes end, for the nursery that has forked them."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from squall.runtime.processes import ending

RAISED = 70  # exit status of a process whose own code raised; its traceback lies in the run's socket directory
LOST = 72  # of a process that ends because another one of its replica was killed: a part, or a loader
DONE = 71  # exit status of a process whose machine has ended; 0 may come from a task that calls os._exit

LAUNCHER_GONE = "the launching process is gone"  # why a run has ended then


def leave(status: int) -> NoReturn:
    """End this process at once, without the interpreter's own clean-up."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def explain(code: int) -> str:
    return {RAISED: "raised an exception", LOST: "another of its processes was lost"}.get(code) or ending(code)
