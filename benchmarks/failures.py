"""`make failures`: what happens when processes of a real run fail, measured; docs/failures.md gets what it finds.

Each case is tried until it has come about `TIMES` times, in one run or in several where it ends the run. Faults come
from outside, as those of `squall chaos` (`squall.chaos`), so nothing here knows how a run saves itself: whatever that
learns, this measures again.
"""

from __future__ import annotations

import datetime
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import commit, machine
from squall.chaos.faults import CUT, FILL_DISK, KILL, PAUSE, Fault
from squall.chaos.machines import HEAD, apart
from squall.chaos.outcome import Outcome, seconds_in_words
from squall.chaos.processes import Family
from squall.chaos.trial import Moment, Plan, Trial

HERE = Path(__file__).parents[1]
FILE, TASK = HERE / "docs" / "failures.md", HERE / "examples" / "digits.py"
BEGIN, END = "<!-- table: written by `make failures` -->\n", "<!-- end of table -->"
TIMES, RUNS_AT_MOST = 3, 5
TRAINS_S, EVERY_S, LASTING_S, SNAPSHOT_EVERY_S = 8.0, 1.6, 1.0, 2.0
STRATEGIES = {"downpour": ["--replicas", "2", "--shards", "2"], "synchronous": ["--replicas", "2"]}
MACHINES, APART_S, CUT_S, TRAINS_APART_S = 3, 15.0, 5.0, 60.0  # who is lost needs a while to join again
COPIED = ["--copies", "2", "--machines", str(MACHINES), "--listen", HEAD]


def starting(directory: Path, family: Family) -> bool:
    """As soon as there is anybody."""
    return True


def saving(directory: Path, family: Family) -> bool:
    """While files of a snapshot are written."""
    return any((directory / "snapshots").glob("*.partial"))


@dataclass
class Case:
    what: str
    when: str
    fault: Fault
    strategy: str = "downpour"
    moment: Moment | None = None
    machines: int = 1
    waits: list[float] = field(default_factory=list)
    ended: int = 0  # runs
    runs: list[Outcome] = field(default_factory=list)

    def measure(self, home: Path) -> None:
        while len(self.waits) < TIMES and len(self.runs) < RUNS_AT_MOST:
            seed = len(self.runs)
            saves_s = 0.3 if self.moment is saving else SNAPSHOT_EVERY_S
            every_s, lasting_s, trains_s = EVERY_S, LASTING_S, TRAINS_S
            if self.machines > 1:
                every_s, lasting_s, trains_s = APART_S, CUT_S, TRAINS_APART_S
            plan = Plan([self.fault], every_s, lasting_s, seed, self.moment, self.moment is not starting,
                        1 if self.moment is starting else TIMES - len(self.waits), self.machines)  # fmt: skip
            directory = home / "run"
            command = [
                sys.executable, "-m", "squall", "train", str(TASK), "--strategy", self.strategy,
                *STRATEGIES[self.strategy], *(COPIED if self.machines > 1 else ()), "--run-dir", str(directory),
                "--seconds", str(trains_s), "--quiet", "--snapshot-every-s", str(saves_s), "--seed", str(seed),
            ]  # fmt: skip
            outcome = Trial(plan, directory).go(command, output=subprocess.DEVNULL)
            self.runs.append(outcome)
            self.waits += [injury.without_s for injury in outcome.injuries]
            self.ended += bool(outcome.injuries) and outcome.ended != "finished"
            shutil.rmtree(directory, ignore_errors=True)
            shutil.rmtree("runs", ignore_errors=True)  # of deputies

    @property
    def row(self) -> str:
        went_on = [wait for wait in self.waits if not math.isinf(wait)]
        happens = "training goes on" if not self.ended else f"{self.ended} of {len(self.waits)} end the run"
        left = {name for outcome in self.runs for name in outcome.left}
        happens += f"; left behind: {', '.join(sorted(left))}" if left else ""
        waits = (
            [seconds_in_words(value) for value in (statistics.median(went_on), max(went_on))] if went_on else ["-", "-"]
        )
        finished = [outcome for outcome in self.runs if outcome.ended == "finished"]
        lost = max((outcome.missed for outcome in finished), default=0)
        again = max((outcome.repeated for outcome in finished), default=0)
        unsaved = max((outcome.unsaved for outcome in self.runs if outcome.ended != "finished"), default=0)
        resumed = f"{unsaved:,} at most, by `squall resume`" if self.ended else ""
        cells = [
            self.what, self.when, self.strategy, str(len(self.waits)), happens, *waits, f"{lost:,}",
            "; ".join(filter(None, [f"{again:,}" if finished else "", resumed])),
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"


def cases() -> list[Case]:
    roles = ("replica", "shard", "evaluator", "coordinator", "nursery")
    found = [
        Case(f"{_a(role)} is killed", "while it trains", Fault(KILL, role), strategy)
        for role in roles for strategy in STRATEGIES
    ]  # fmt: skip
    found += [
        Case(f"{_a(role)} is killed", "as it starts", Fault(KILL, role), moment=starting)
        for role in roles if role != "evaluator"
    ]  # fmt: skip
    found += [
        Case(f"{_a(role)} is killed", "while a snapshot is written", Fault(KILL, role), moment=saving)
        for role in ("replica", "shard", "coordinator")
    ]  # fmt: skip
    found += [
        Case(f"{_a(role)} stands still for {LASTING_S:g} s", "while it trains", Fault(PAUSE, role), strategy)
        for role in ("replica", "shard", "coordinator") for strategy in STRATEGIES
    ]  # fmt: skip
    full = f"the disk is full for {LASTING_S:g} s"
    found += [Case(full, "while it trains", Fault(FILL_DISK), strategy) for strategy in STRATEGIES]
    lost = f"one of {MACHINES} machines loses its nursery, and so all (`--copies 2`)"
    cut = f"one of {MACHINES} machines, not the first, is cut off for {CUT_S:g} s (`--copies 2`)"
    return found + [
        Case(what, "while it trains", fault, strategy, machines=MACHINES)
        for what, fault in ((lost, Fault(KILL, "nursery")), (cut, Fault(CUT))) for strategy in STRATEGIES
    ]  # fmt: skip


def _a(role: str) -> str:
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"


def table(measured: Sequence[Case], load: float, stamp: str) -> str:
    """`load`: the most that the machine had meanwhile. `stamp`: the commit."""
    head = (
        "| what | when | strategy | times | what happens | without an update: median | worst | examples lost | examples"
    )
    lines = [
        f"Commit {stamp}, {datetime.date.today().isoformat()}, {machine()}; its load was {load:.0f} at most.", "",
        f"{head} trained again |", "|---|---|---|---|---|---|---|---|---|", *(case.row for case in measured), "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    apart([sys.executable, "-m", "benchmarks.failures"])
    measured = cases()
    home = Path(tempfile.mkdtemp(prefix="failures-"))
    stamp = commit()
    os.chdir(home)  # where machines that go on with a run keep it
    load = 0.0
    for case in measured:
        case.measure(home)
        load = max(load, os.getloadavg()[0])
        print(case.row, flush=True)
    text = FILE.read_text()
    before, _, rest = text.partition(BEGIN)
    FILE.write_text(f"{before}{BEGIN}{table(measured, load, stamp)}{END}{rest.partition(END)[2]}")
    shutil.rmtree(home)
    print(f"written to {FILE}")


if __name__ == "__main__":
    main()
