"""The page of a run while it goes on, served by a process beside the launching one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from squall.record.settling import settle


@contextmanager
def live_page(run_dir: Path) -> Iterator[None]:
    """Serve it, and say its link on stderr."""
    command = [sys.executable, "-m", "squall", "live", str(run_dir), "--of", str(os.getpid())]
    # In a process group of its own: Ctrl-C ends the training, and the page is to show how.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, process_group=0)
    try:
        yield
    finally:
        server.kill()  # it has nothing to save, and one that is stopped by its terminal ends as well
        server.wait()
        if (record := run_dir / "run.sqlite").is_file():  # which a page that is open has held
            settle(record)
