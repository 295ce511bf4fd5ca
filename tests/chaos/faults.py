"""What can go wrong with a run on one machine, how to bring it about, and what the README promises then."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.launchers.processes import Started

GOES_ON, ENDS, STOPS, KILLED = 0, 1, 130, -signal.SIGKILL  # exit statuses of the launching process


@dataclass
class Scene:
    """A run under way, and what must be undone behind it."""

    run: Started
    chance: random.Random
    undo: ExitStack = field(default_factory=ExitStack)
    stopped: list[int] = field(default_factory=list)  # pids that do not answer

    @property
    def home(self) -> Path:
        """The working directory of all of its processes."""
        return self.run.directory.parent

    def pids(self, role: str = "") -> list[int]:
        return [pid for title, pid in self.run.processes().items() if title.startswith(role)]

    def pick(self, role: str = "") -> int | None:
        found = self.pids(role)
        return self.chance.choice(found) if found else None

    def send(self, role: str, number: int) -> bool:
        """False: there is no such process, or no more."""
        pid = self.pick(role)
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def pause(self) -> None:
        """Between a fault and its healing; nothing is waited for."""
        threading.Event().wait(self.chance.uniform(0.2, 2.0))


@dataclass(frozen=True)
class Fault:
    """`bring` says whether it came about. `statuses` are those that the run may end with."""

    bring: Callable[[Scene], bool]
    statuses: tuple[int, ...]
    says: str = ""  # a pattern that stderr has where the run ended by it
    repeats: bool = False  # some examples may be trained again
    replayable: bool = True


def kill(role: str, number: int = signal.SIGKILL) -> Callable[[Scene], bool]:
    return lambda scene: scene.send(role, number)


def pause(scene: Scene) -> bool:
    """A machine that hangs for a while."""
    pid = scene.pick()
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        scene.pause()
        os.kill(pid, signal.SIGCONT)
    return True


def hog(scene: Scene) -> bool:
    """Somebody else's work on all cores."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    scene.pause()
    for other in others:
        other.kill()
        other.wait()
    return True


def lock_record(scene: Scene) -> bool:
    """A person looks at the record with a tool that locks it."""
    path = scene.run.directory / "run.sqlite"
    if not path.exists():
        return False
    with closing(sqlite3.connect(path, timeout=5)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            return False
        scene.pause()
        database.rollback()
    return True


def full_disk(scene: Scene) -> bool:
    """No process of the run can make a file longer, for a while."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    pids = scene.pids()

    def limit(to: tuple[int, int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, to)

    limit((1, resource.RLIM_INFINITY))
    scene.pause()
    limit(unlimited)
    return bool(pids)


def file(name: str) -> Callable[[Scene], bool]:
    """A fault that the task brings about itself."""

    def ask(scene: Scene) -> bool:
        path = scene.home / name
        path.touch()
        scene.undo.callback(path.unlink, missing_ok=True)
        return True

    return ask


def interrupt(number: int, times: int = 1) -> Callable[[Scene], bool]:
    def send(scene: Scene) -> bool:
        for _ in range(times):
            scene.run.process.send_signal(number)
        return True

    return send


def hang(then: Callable[[Scene], bool]) -> Callable[[Scene], bool]:
    """A process that never answers again, and somebody who then ends the run."""

    def stop(scene: Scene) -> bool:
        pid = scene.pick()
        if pid is None:
            return False
        scene.stopped.append(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        scene.pause()
        return then(scene)

    return stop


def kill_launcher(scene: Scene) -> bool:
    scene.run.process.kill()
    return True


def remove_directory(scene: Scene) -> bool:
    if not (scene.run.directory / "run.sqlite").exists():
        return False
    shutil.rmtree(scene.run.directory, ignore_errors=True)
    return True


FAULTS = {
    "kill a replica": Fault(kill("replica"), (GOES_ON,), repeats=True),
    "kill the evaluator": Fault(kill("evaluator"), (GOES_ON,)),
    "real-time signal to a replica": Fault(kill("replica", signal.SIGRTMIN + 1), (GOES_ON,), repeats=True),
    "pause a process": Fault(pause, (GOES_ON,)),
    "work of others": Fault(hog, (GOES_ON,)),
    "lock the record": Fault(lock_record, (GOES_ON,)),
    "full disk for a while": Fault(full_disk, (GOES_ON, ENDS), r"could not be written|cannot|space", replayable=False),
    "a NaN": Fault(file("nan"), (GOES_ON,), repeats=True, replayable=False),
    "kill a shard": Fault(kill("shard"), (GOES_ON, ENDS), r"shard \d.*squall resume", repeats=True),
    "kill the coordinator": Fault(kill("coordinator"), (GOES_ON, ENDS), r"coordinator.* was lost", repeats=True),
    "kill the nursery": Fault(kill("nursery"), (GOES_ON, ENDS), r"nursery.* was lost", repeats=True),
    "always NaN": Fault(file("always nan"), (ENDS,), r"NaN or Inf.*epoch \d+", repeats=True, replayable=False),
    "the task raises": Fault(file("raise"), (ENDS,), r"asked for", repeats=True, replayable=False),
    "remove the directory": Fault(remove_directory, (ENDS,), r"was removed|director", replayable=False),
    "Ctrl-C": Fault(interrupt(signal.SIGINT), (STOPS,), r"squall resume|interrupted", repeats=True),
    "SIGTERM": Fault(interrupt(signal.SIGTERM), (STOPS,), r"squall resume|interrupted|terminated", repeats=True),
    "Ctrl-C three times": Fault(interrupt(signal.SIGINT, 3), (STOPS,), r"squall resume|interrupted", repeats=True),
    "hang, then Ctrl-C": Fault(hang(interrupt(signal.SIGINT)), (STOPS,), r"squall resume|interrupted", repeats=True),
    "kill the launching process": Fault(kill_launcher, (KILLED,), repeats=True),
    "hang, then kill the launching process": Fault(hang(kill_launcher), (KILLED,), repeats=True),
}
