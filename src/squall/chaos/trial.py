"""Start a run, bring faults about while it trains, and see what has become of it."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from squall.chaos.faults import KILL, Fault, Injury, bring
from squall.chaos.machines import Machines
from squall.chaos.outcome import Outcome
from squall.chaos.processes import Family
from squall.chaos.updates import Updates
from squall.launchers.joining.token import VARIABLE, Token
from squall.record.rows import MemberRow, RecordError
from squall.report import Reader

POLL_S = 0.01
LOOK_EVERY_S = 0.25  # for new processes
LED_WITHIN_S = 20.0  # that a run on several machines may be without a coordinator
GONE_WITHIN_S = 5.0  # that processes have to be gone, when the command has ended
SPREAD = 0.5  # of the time between faults, by which they come earlier or later

Moment = Callable[[Path, Family], bool]


@dataclass(frozen=True)
class Plan:
    """Which faults, and when.

    Attributes:
        faults: of which each time one is chosen.
        every_s: seconds between them, from the first update on, give or take half of it.
        lasting_s: seconds that a fault lasts which heals.
        seed: of the choices.
        moment: further moments at which alone a fault comes, such as the one of a snapshot; None: any.
        begun: faults come only while it trains; else from the start.
        at_most: so many.
        machines: of the run. All but the first are made here (`Machines`), where `apart` has returned.
    """

    faults: Sequence[Fault]
    every_s: float = 2.0
    lasting_s: float = 1.0
    seed: int = 0
    moment: Moment | None = None
    begun: bool = True
    at_most: float = math.inf
    machines: int = 1


@dataclass
class Trial:
    """`directory` is the run's, in which `command` trains; each fault is said as it comes."""

    plan: Plan
    directory: Path
    say: Callable[[str], None] = lambda text: None
    injuries: list[Injury] = field(default_factory=list)
    interrupted: bool = False

    def go(self, command: Sequence[str], output: int | None = None) -> Outcome:
        """`output`: what both outputs of the command lead to; None: to those of this process."""
        with tempfile.TemporaryDirectory(prefix="squall-chaos-") as home:
            own, before = {**os.environ, "TMPDIR": home, VARIABLE: Token.for_all().text()}, set(_shared())
            with (
                Machines(self.plan.machines) if self.plan.machines > 1 else nullcontext() as self._machines,
                subprocess.Popen(command, env=own, stdout=output, stderr=output) as run,
                closing(Updates(self.directory)) as self._updates,
            ):
                self._family = Family(run.pid)
                self._chance = random.Random(self.plan.seed)
                self._began = self._moved_at = self._looked_at = self._struck_at = -math.inf
                self._led, self._led_at = {self.directory.name}, time.monotonic()
                self._next_at = math.inf if self.plan.begun else -math.inf
                self._heals: list[tuple[float, Injury]] = []
                if self._machines is not None:
                    self._machines.begin(own)
                with self._passing_on(run):
                    self._attend(run)
                left = self._machines.end(GONE_WITHIN_S) if self._machines is not None else []
            left += [*self._left(), *map(str, Path(home).glob("squall-*")), *map(str, set(_shared()) - before)]
        outcome = Outcome(self.directory, 0 if len(self._led) > 1 else run.returncode, self.injuries, left)
        if outcome.ended != "finished" and self.injuries:
            self.injuries[-1].without_s = math.inf
        return outcome

    @contextmanager
    def _passing_on(self, run: subprocess.Popen[bytes]) -> Iterator[None]:
        """SIGTERM ends the run in order, and this with it."""

        def terminate(number: int, frame: object) -> None:
            self.interrupted = True
            run.terminate()

        before = signal.signal(signal.SIGTERM, terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _attend(self, run: subprocess.Popen[bytes]) -> None:
        try:
            while run.poll() is None or (not self.interrupted and self._goes_on_elsewhere()):
                time.sleep(POLL_S)
                self._turn(time.monotonic())
        except KeyboardInterrupt:  # the run has heard of it as well
            self.interrupted = True
            self._heal(math.inf)
            run.wait()
        finally:
            self._heal(math.inf)

    def _goes_on_elsewhere(self) -> bool:
        """Without its first machine: a coordinator is there, or may soon be."""
        if self._machines is None or time.monotonic() > self._led_at + LED_WITHIN_S:
            return False
        with suppress(RecordError), closing(Reader(self.directory / "run.sqlite")) as reader:
            return reader.state().get("status") == "running"
        return True

    def _look(self, now: float) -> None:
        """For processes that have come, and for the coordinator."""
        self._looked_at = now
        if self._machines is None:
            self._family.look()
            return
        self._family.adopt(self._machines.turn(now))
        for found in self._family.of("coordinator"):
            self._led_at = now
            if found.run not in self._led and (directory := Path("runs", found.run).absolute()).exists():
                self._led.add(found.run)
                self.directory = directory
                self._updates.follow(directory)
                self._machines.follow(found.pid)

    def _turn(self, now: float) -> None:
        if self._updates.moved():
            self._on_update(now)
        if now >= self._looked_at + LOOK_EVERY_S:
            self._look(now)
        self._heal(now)
        due = now >= self._next_at and len(self.injuries) < self.plan.at_most
        if due and self.plan.begun and self._moved_at <= self._struck_at:  # it starts again, only a few times in a row
            self._put_off(now)
        elif due and (self.plan.moment is None or self.plan.moment(self.directory, self._family)):
            self._strike(now)

    def _on_update(self, now: float) -> None:
        if math.isinf(self._began):
            self._began = now
            self._put_off(now)
        elif self.injuries and not math.isinf(self._moved_at):
            last = self.injuries[-1]
            last.without_s = max(last.without_s, now - self._moved_at)
        self._moved_at = now

    def _strike(self, now: float) -> None:
        before = self._chance.getstate()
        fault = self._chance.choice(self.plan.faults)
        at_s = max(0.0, now - self._began) if not math.isinf(self._began) else 0.0
        injury = bring(fault, self._family, self._chance, at_s, self._machines, self._whole())
        if injury is None:  # they may be there in a moment, and what is hit then is what the seed says
            self._chance.setstate(before)
            if self._machines is not None:  # their record is read for it
                self._next_at = now + LOOK_EVERY_S
            return
        self.injuries.append(injury)
        self._struck_at = now
        lasting = "" if fault.kind == KILL else f", for {self.plan.lasting_s:g} s"
        self.say(f"{at_s:7.1f} s  {injury.text}{lasting}")
        if injury.heal is not None:
            self._heals.append((now + self.plan.lasting_s, injury))
        self._put_off(now)

    def _whole(self) -> bool:
        """All machines are there, and of each shard and the coordinator a copy that can take over, where there are."""
        if self._machines is None:
            return True
        if self._heals or len(self._family.of("nursery")) <= len(self._machines.numbers):
            return False  # who is cut off lives
        with suppress(RecordError), closing(Reader(self.directory / "run.sqlite")) as reader:
            members = (row for row in reader.rows(MemberRow) if row.node.startswith(("deputy", "backup")))
            newest = {row.node.partition(".")[0]: row.change for row in members}
            state = reader.state()
            copies, shards = (int(state.get(name) or 0) for name in ("copies", "shards"))
            wanted = ["deputy-0", *(f"backup-{shard}" for shard in range(shards))] if copies > 1 else []
            return all(newest.get(name) == "joined" for name in wanted)
        return False

    def _put_off(self, now: float) -> None:
        self._next_at = now + self.plan.every_s * self._chance.uniform(1 - SPREAD, 1 + SPREAD)

    def _heal(self, now: float) -> None:
        for at, injury in [each for each in self._heals if each[0] <= now]:
            self._heals.remove((at, injury))
            assert injury.heal is not None
            injury.heal()

    def _left(self) -> list[str]:
        """Processes that outlive the command, which are ended then."""
        until = time.monotonic() + GONE_WITHIN_S
        while (living := self._family.look()) and time.monotonic() < until:
            time.sleep(POLL_S)
        for found in living:
            with suppress(ProcessLookupError):
                os.kill(found.pid, 9)
        return [str(found) for found in living]


def _shared() -> Iterator[Path]:
    """Shared memory that has a name."""
    return Path("/dev/shm").glob("squall-*")
