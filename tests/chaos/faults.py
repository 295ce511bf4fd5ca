"""What can go wrong with a run on one machine, how to bring it about, and what the README promises then."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from squall.chaos import faults as chaos
from squall.chaos.faults import bring, send
from squall.chaos.processes import ANY, Family, Found
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

    def pick(self, role: str = ANY) -> Found | None:
        found = sorted(self.family.of(role))
        return self.chance.choice(found) if found else None

    @cached_property
    def family(self) -> Family:
        return Family(self.run.process.pid)

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


def strike(kind: str, role: str = ANY) -> Callable[[Scene], bool]:
    """What `squall chaos` does, too."""

    def bring_about(scene: Scene) -> bool:
        injury = bring(chaos.Fault(kind, role), scene.family, scene.chance, 0.0)
        if injury is not None and injury.heal is not None:
            scene.pause()
            injury.heal()
        return injury is not None

    return bring_about


def signalled(scene: Scene) -> bool:
    victim = scene.pick("replica")
    if victim is not None:
        send(victim, signal.SIGRTMIN + 1)
    return victim is not None


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
        victim = scene.pick()
        if victim is None:
            return False
        scene.stopped.append(victim.pid)
        send(victim, signal.SIGSTOP)
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
    "kill a replica": Fault(strike(chaos.KILL, "replica"), (GOES_ON,), repeats=True),
    "kill the evaluator": Fault(strike(chaos.KILL, "evaluator"), (GOES_ON,)),
    "real-time signal to a replica": Fault(signalled, (GOES_ON,), repeats=True),
    "pause a process": Fault(strike(chaos.PAUSE), (GOES_ON,)),
    "work of others": Fault(hog, (GOES_ON,)),
    "lock the record": Fault(lock_record, (GOES_ON,)),
    "full disk for a while": Fault(
        strike(chaos.FILL_DISK), (GOES_ON, ENDS), r"could not be written|cannot|space", replayable=False
    ),
    "a NaN": Fault(file("nan"), (GOES_ON,), repeats=True, replayable=False),
    "kill a shard": Fault(strike(chaos.KILL, "shard"), (GOES_ON, ENDS), r"shard \d.*squall resume", repeats=True),
    "kill the coordinator": Fault(strike(chaos.KILL, "coordinator"), (GOES_ON,)),
    "kill the nursery": Fault(strike(chaos.KILL, "nursery"), (GOES_ON, ENDS), r"nursery.* was lost", repeats=True),
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
