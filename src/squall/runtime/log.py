"""What a run's processes print, once no terminal shows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

LOG = "log.txt"  # file in the run's directory


def log_into(directory: Path, outputs: Iterable[int] = (1, 2)) -> None:
    """What is written to these descriptors from here on, also by processes that are forked from this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(directory / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for output in outputs:
        os.dup2(file, output)
    os.close(file)
