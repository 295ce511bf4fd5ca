"""One trial: a run, some faults, what was promised; then it is resumed until it has finished, and audited."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from squall.record.rows import ProgressRow
from squall.report import Reader
from squall.runtime.snapshot import Snapshots
from tests.chaos.faults import ENDS, FAULTS, GOES_ON, KILLED, STOPS, Fault, Scene
from tests.launchers.processes import Started, wait_for

TASK = Path(__file__).with_name("task.py")
LIVES = 4  # the last is without faults
LIFE_S = 120.0
STOP_S, GONE_S, DRAW_S = 3.0, 5.0, 6.0  # an orderly end; everything gone; a report is drawn behind it
STRATEGIES = (
    "downpour", "downpour --shards 2", "synchronous", "synchronous --backup 1 --replicas 3",
    "bounded_delay --max-delay 2", "asynchronous_sgd --shards 2", "averaging --every 4", "elastic_averaging",
    "diloco --inner-steps 8", "sandblaster",
    "all_reduce --replicas 3",
)  # fmt: skip


class Broken(Exception):
    """Something was not as promised."""


@dataclass
class Trial:
    """`name` and `seed` decide what is tried; when a fault hits, the machine decides as well."""

    name: str
    seed: int
    home: Path
    slack: float = 1.0  # times are multiplied by it, on machines that have other work
    story: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # that came about
    output: str = ""

    def go(self) -> None:
        """Raises `Broken`, with the story so far in `story`."""
        self.chance = random.Random(self.seed)
        (self.home / "tmp").mkdir(parents=True)
        self.directory = self.home / self.name
        self.script = self.chance.random() < 0.2
        command = self._command()
        for life in range(LIVES):
            last = life == LIVES - 1
            status = self._live(command, [] if last else self._chosen())
            if not self.directory.exists() or not (self.directory / "code.pickle").exists():
                return  # it was removed, or never began
            if status == GOES_ON:
                break
            command = ["resume", str(self.directory)]
            self._damage()
        else:
            raise Broken("its last life, without a fault, did not finish it")
        self._audited()

    def _command(self) -> list[str]:
        strategy = self.chance.choice(STRATEGIES)
        while self.script and strategy == "sandblaster":
            strategy = self.chance.choice(STRATEGIES)
        flags = ["--strategy", *strategy.split(), "--run-dir", str(self.directory), "--snapshot-every-s", "0.7"]
        epochs = str(self.chance.randint(20, 60))
        self.replayed = not (self.script and strategy.startswith("all_reduce"))
        self.story.append(f"{'script' if self.script else 'task'}, {strategy}, {epochs} epochs")
        if self.script:
            return ["run", *flags, str(TASK), epochs]
        limit = ["--steps", epochs] if strategy == "sandblaster" else ["--epochs", epochs]
        return ["train", *flags, *limit, str(TASK)]

    def _chosen(self) -> list[str]:
        """Faults of one life; one that ends it comes last."""
        heal = [name for name, fault in FAULTS.items() if GOES_ON in fault.statuses]
        end = [name for name, fault in FAULTS.items() if GOES_ON not in fault.statuses]
        return self.chance.sample(heal, self.chance.randint(1, 3)) + self.chance.sample(end, self.chance.randint(0, 1))

    # ------------------------------------------------------------ a life

    def _live(self, command: list[str], faults: list[str]) -> int:
        run = Started(self.directory, *command, cwd=self.home, env={**os.environ, "TMPDIR": str(self.home / "tmp")})
        scene = Scene(run, self.chance)
        happened: list[str] = []
        reader = threading.Thread(target=self._read, args=(run,))
        reader.start()
        try:
            early = self.chance.random() < 0.15
            before = len(run.rows(ProgressRow))
            if not early:
                self._await(
                    lambda: run.process.poll() is not None or len(run.rows(ProgressRow)) > before, 60, "training"
                )
            for name in faults:
                threading.Event().wait(self.chance.uniform(0.0, 1.0))
                if run.process.poll() is None and FAULTS[name].bring(scene):
                    happened.append(name)
            self._ended(run, happened)
        finally:
            scene.undo.close()
            for pid in scene.stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.process.kill()
            reader.join()
        self.faults += happened
        status = run.process.returncode
        self.story.append(f"{command[0]}: {', '.join(happened) or 'no fault'} -> {status}")
        self._kept(status, [FAULTS[name] for name in happened])
        return status

    def _read(self, run: Started) -> None:
        out, err = run.process.communicate()
        self.output = out + err

    def _ended(self, run: Started, happened: list[str]) -> None:
        ends = [name for name in happened if GOES_ON not in FAULTS[name].statuses]
        within = LIFE_S if not ends else STOP_S + DRAW_S
        self._await(lambda: run.process.poll() is not None, within, "the command to end")
        self._await(lambda: not _living(self.home), GONE_S, "all processes to be gone")

    def _await(self, condition: object, timeout_s: float, what: str) -> None:
        try:
            wait_for(condition, timeout_s * self.slack, what)  # type: ignore[arg-type]
        except AssertionError as error:
            raise Broken(f"{error}; there are {', '.join(_living(self.home).values()) or 'no processes'}") from None

    def _kept(self, status: int, faults: list[Fault]) -> None:
        """The promises about a life that is over."""
        allowed = {GOES_ON, *(status for fault in faults for status in fault.statuses)}
        if status in (-signal.SIGINT, -signal.SIGTERM) and STOPS in allowed and self._idle():
            return  # it came before the command had begun with anything, or when all was done
        if status not in allowed:
            raise Broken(f"exit status {status}, promised was one of {sorted(allowed)}")
        if status not in (GOES_ON, KILLED):
            patterns = [fault.says for fault in faults if status in fault.statuses]
            if not any(re.search(pattern, self.output, re.DOTALL) for pattern in patterns):
                raise Broken(f"it says nothing of {' or '.join(patterns)}")
        raised = any(FAULTS["the task raises"] is fault for fault in faults)
        if "Traceback" in self.output and not raised:
            raise Broken("a traceback of Squall's own")
        left = [path.name for path in (self.home / "tmp").glob("squall-*")]
        if left and status != KILLED:
            raise Broken(f"left in the temporary folder: {', '.join(left)}")

    def _idle(self) -> bool:
        if not (self.directory / "run.sqlite").exists():
            return True
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            return reader.state().get("status") != "running"

    # ------------------------------------------------------------ between lives, and behind the last

    def _damage(self) -> None:
        """Now and then bits of the newest snapshot flip; a resume must say so, or go on from the one before."""
        numbers = Snapshots(self.directory).numbers()
        if not numbers or self.chance.random() > 0.25:
            return
        newest = Snapshots(self.directory).directory / f"{numbers[-1]:06d}"
        victim = self.chance.choice(sorted(newest.glob("*.safetensors")))
        data = bytearray(victim.read_bytes())
        for place in self.chance.sample(range(len(data) // 2, len(data)), 200):
            data[place] ^= 0xFF
        victim.write_bytes(data)
        self.faults.append("damage a snapshot")
        done = subprocess.run([sys.executable, "-m", "squall", "resume", str(self.directory)], capture_output=True,
                              text=True, cwd=self.home, timeout=LIFE_S)  # fmt: skip
        self.story.append(f"damaged {victim.name} of {numbers[-1]} -> {done.returncode}")
        if str(victim) not in done.stderr:
            raise Broken(f"the resume does not name the damaged {victim}: {done.stderr[-500:]}")
        if done.returncode == ENDS:
            shutil.rmtree(newest)

    def _audited(self) -> None:
        said = self._squall("report", "--audit", str(self.directory))
        if re.search("[Nn]ever trained: |missed examples", said):
            raise Broken(f"the audit: {said}")
        if "more than once" in said and not any(f in FAULTS and FAULTS[f].repeats for f in self.faults):
            raise Broken(f"nothing explains these repeats: {said}")
        replayable = all(name in FAULTS and FAULTS[name].replayable for name in self.faults)
        if replayable and self.replayed and self.chance.random() < 0.5:
            self.story.append("replayed")
            said = self._squall("replay", "--check", str(self.directory))
            if "bit for bit" not in said:
                raise Broken(f"the replay: {said}")

    def _squall(self, *arguments: str) -> str:
        done = subprocess.run([sys.executable, "-m", "squall", *arguments], capture_output=True, text=True,
                              cwd=self.home, timeout=LIFE_S)  # fmt: skip
        if done.returncode:
            raise Broken(f"squall {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout


def _living(home: Path) -> dict[int, str]:
    """Pid -> title of all processes that work in this directory."""
    return {pid: title for pid, title in _processes(home) if title}


def _processes(home: Path) -> Iterator[tuple[int, str]]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "cwd").readlink() == home:
                yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
