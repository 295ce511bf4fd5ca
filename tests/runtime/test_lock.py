"""A run's directory is one start's alone, for as long as any of its processes lives."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from squall.runtime.lock import hold

# Holds the lock, and has a child that inherits it, and says its pid when it has its title; both wait to be killed.
HOLDER = """
import os, pathlib, signal, sys
from setproctitle import setproctitle
from squall.runtime.lock import hold
with hold(pathlib.Path(sys.argv[1])):
    if not os.fork():
        setproctitle("squall shard 0 of it")
        print(os.getpid(), flush=True)
    signal.pause()
"""


def test_whoever_inherits_the_lock_keeps_others_out_and_is_named(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        with pytest.raises(ValueError, match=rf"by another process \(pid {process.pid}\): .* stop it: kill"):
            hold(tmp_path).__enter__()
        process.kill()
        process.wait()
        try:
            expected = rf"shard 0 of it \(pid {child}\), whose launching process is gone: end them: kill -KILL {child}"
            with pytest.raises(ValueError, match=expected):
                hold(tmp_path).__enter__()
        finally:
            os.kill(child, signal.SIGKILL)
        assert process.stdout.read() == ""  # the child has ended
    with hold(tmp_path):
        pass


def test_a_directory_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing/lock cannot be written .*: choose another run directory"):
        hold(tmp_path / "missing").__enter__()
