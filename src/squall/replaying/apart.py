"""A replay in a process of its own: one that forks has no thread pools, and the caller's may have them."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from squall.errors import SquallError
from squall.launchers.environment import environment
from squall.runtime.processes import die_with_parent, ending

if TYPE_CHECKING:
    from squall.replaying.replayed import Replayed


def replay_apart(run_dir: Path, **asked: Any) -> Replayed:
    """What `squall.replay` comes to in a new interpreter, which prints on standard error. Raises what it raises."""
    mine, theirs = Pipe()
    with mine:
        with theirs:
            process = start_replay(theirs.fileno())
        try:
            mine.send_bytes(cloudpickle.dumps((os.getpid(), sys.path, run_dir.absolute(), asked)))
            added, answer = cloudpickle.loads(mine.recv_bytes())  # from the process started here
        except (EOFError, OSError):
            raise SquallError(f"the process of the replay is gone: {ending(process.wait())}") from None
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
    sys.path[:0] = [folder for folder in added if folder not in sys.path]  # the user's modules are found there
    found: Replayed | Exception = cloudpickle.loads(answer)
    if isinstance(found, Exception):
        raise found
    return found


def start_replay(pipe: int) -> subprocess.Popen[bytes]:
    """A new process that has this end of the pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", _ENTRY, str(pipe)], pass_fds=[pipe], env=environment(), stdin=subprocess.DEVNULL,
        stdout=2,
    )  # fmt: skip


_ENTRY = """
import sys
from squall.replaying.apart import main
main(int(sys.argv[1]))
"""


def main(handle: int) -> None:
    """Entry point of that process: `handle` is its end of the pipe."""
    with Connection(handle) as pipe:
        parent, sys.path[:], run_dir, asked = cloudpickle.loads(pipe.recv_bytes())
        die_with_parent(parent)
        from squall.replaying.run import replay

        try:
            answer = cloudpickle.dumps(replay(run_dir, **asked, own_process=True))
        except Exception as error:
            answer = cloudpickle.dumps(error)
        pipe.send_bytes(cloudpickle.dumps((sys.path, answer)))
