"""Replaying a run: from its seed and its schedule to the same weights, in one process."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from squall.errors import SnapshotMismatch
from squall.launchers import scratch
from squall.launchers.environment import is_script, replayed_apart
from squall.protocol.nodes import Node
from squall.replaying.apart import replay_apart
from squall.replaying.findings import Observer
from squall.replaying.group_replay import GroupReplay
from squall.replaying.grouped import GroupedReplicas
from squall.replaying.processes import Processes, Strayed
from squall.replaying.replay import Replay
from squall.replaying.replayed import Replayed
from squall.replaying.scripts import run_to_join
from squall.runtime import attempts
from squall.runtime import replay_starts as cuts
from squall.runtime.attempts import Start, surroundings
from squall.runtime.backward import resolve_device
from squall.runtime.job import private_job
from squall.runtime.run_plan import Plan
from squall.runtime.schedule import Damaged
from squall.runtime.seeds import chance_kept, seed_everything
from squall.runtime.snapshot import Restored, Snapshots
from squall.strategies import Strategy
from squall.strategies.work import Collective
from squall.task import Task
from squall.usercode.kept import Code, ScriptCode, load_code, load_sources
from squall.usercode.sources import changes
from squall.vector import Layout


@chance_kept()
def replay(
    run_dir: str | Path, *, until: int | None = None, check: bool = False, around_nan: bool = False,
    own_process: bool = False,
) -> Replayed:  # fmt: skip
    """Recompute a run in this process, or where its processes computed together in some, to the same bits.

    It begins where the run did, or at the oldest snapshot that enough is kept for (`keep_schedule="last:3"`).

    That needs the same machine, torch version and number of threads; elsewhere the result says what differs, and the
    last bits may. The run's code is unpickled, as `resume` does: only of directories that you trust.

    The run of a script is replayed by the command, `squall replay`, which has a process of its own.

    Args:
        run_dir: of any run but a script's.
        until: stop when every shard has made so many updates.
        check: compare every update with the record, and the snapshots that are still there in whole; stop at the
            first difference.
        around_nan: stop at the first batch whose gradient was not finite.
        own_process: this one is there for nothing else, and has the environment of a nursery. A script is run in it
            until it joins, with what it prints on standard error, and its replicas are forked from it.

    Raises:
        ValueError: there is nothing to replay in this directory; it says why.
    """
    path, began = Path(run_dir), time.monotonic()
    if until is not None and until < 0:
        raise ValueError(f"until is {until}: it must be 0 or more updates")
    if is_script(path) and not own_process:
        raise ValueError(f"{path} is the run of a script: replay it by `squall replay {path}`")
    if not own_process and replayed_apart(path):
        return replay_apart(path, until=until, check=check, around_nan=around_nan)
    threads = torch.get_num_threads()
    try:
        rerun = _Rerun(path, until, check, around_nan, own_process)
        rerun.run()
    finally:
        torch.set_num_threads(threads)
    return rerun.result(time.monotonic() - began)


class _Attempt(NamedTuple):
    """An attempt that is to be replayed. What it did behind the snapshots that `later` ones go on from is not kept."""

    path: Path
    start: Start
    later: list[Start]
    snapshot: int | None = None  # that the replay begins at; None: where the attempt did


class _Rerun:
    """All attempts of a run in turn, each from the snapshot that it went on from."""

    def __init__(self, directory: Path, until: int | None, check: bool, around_nan: bool, forks: bool) -> None:
        """`forks`: replicas are forked, so this process has one thread."""
        self._directory = directory
        self._until, self._check, self._around_nan = until, check, around_nan
        self._forks = forks
        self._attempts = _attempts(directory)
        self._bases: dict[int, Restored] = {}  # snapshots that later attempts go on from, as this replay has computed
        self._notes: list[str] = []  # why the replay is not of the whole run
        self._passed: list[str] = []  # why it begins no sooner
        self._elsewhere: dict[str, None] = {}
        self._snapshots = Snapshots(directory)
        self._compared: dict[int, None] = {}  # snapshots, in their order
        self._fingerprints = 0
        self._strayed = False
        self._snapshot: int | None = None  # that the replay began at
        self._since = 0  # updates in it
        self._observer: Observer | None = None  # of the attempt that was replayed last

    def run(self) -> None:
        try:
            self._attempts = self._attempts[self._earliest() :]
            starts = attempts.readable(self._attempts, self._notes)
            first = self._begin(starts)
            for number in range(first + 1, len(starts)):
                if self._done:
                    break
                self._replay(_Attempt(self._attempts[number], starts[number], starts[number + 1 :]))
        except (Damaged, SnapshotMismatch, Strayed) as error:
            self._notes.append(str(error))
            self._strayed = isinstance(error, Strayed)
            if self._observer is None:
                raise ValueError(f"{self._directory} cannot be replayed: {error}") from None
        if self._until is not None and not self._done:
            self._notes.append(f"the run did not come to update {self._until}")

    @property
    def _done(self) -> bool:
        return self._observer is not None and (self._observer.found or self._observer.reached)

    def _begin(self, starts: list[Start]) -> int:
        """Replay the first attempt, from the earliest moment that it can be replayed from; returns its number."""
        for number, path in enumerate(self._attempts[: len(starts)]):
            later = starts[number + 1 :]
            for snapshot in self._beginnings(path, later):
                try:
                    self._replay(_Attempt(path, starts[number], later, snapshot))
                    return number
                except (Damaged, SnapshotMismatch) as error:
                    if self._observer is not None:
                        raise
                    self._passed.append(str(error))
        raise Damaged(self._passed[-1] if self._passed else "it is kept from no snapshot on")

    def _earliest(self) -> int:
        """The number of the first attempt from which on nothing is missing up to where the replay is to end."""
        for number, path in reversed(list(enumerate(self._attempts))):
            if None not in self._beginnings(path, []):
                within = self._until is not None and self._until <= attempts.read_start(path).updates
                if not within:
                    return number
        return 0

    def _beginnings(self, path: Path, later: list[Start]) -> list[int | None]:
        """Snapshots that an attempt may be replayed from, the earliest first; None: its start."""
        if not any(path.glob("from-*")):
            return [None]
        shards = load_code(path)["plan"].shards
        found = cuts.complete(path, shards)
        whole = all((path / str(Node("shard", i))).exists() for i in range(shards))
        return [*([None] if whole else []), *(n for n in found if not later or n < attempts.kept_upto(later))]

    def _replay(self, attempt: _Attempt) -> None:
        code = load_code(attempt.path)
        plan = self._here(code, attempt.start)
        self._elsewhere |= dict.fromkeys(changes(load_sources(attempt.path).imported))
        perform = partial(self._perform, attempt, plan)
        if "script" in code:
            torch.set_num_threads(1)  # a thread pool would not survive the forks
            with scratch.directory() as folder:
                run_to_join(code, folder, perform)
            return
        if plan.settings.launcher != "inline" and not code["strategy"].recipe().alone:
            torch.set_num_threads(1)  # as the nursery had that built it in the run: some initial weights depend on it
        seed_everything(plan.seed)
        task = code["task"]()
        if self._forks and plan.settings.launcher != "inline" and not code["strategy"].recipe().alone:
            with scratch.directory() as folder:
                perform(code["strategy"], task, _in_groups(code["strategy"], folder, plan.settings.parts))
            return
        torch.set_num_threads(plan.threads)
        perform(code["strategy"], task)

    def _perform(
        self, attempt: _Attempt, plan: Plan, strategy: Strategy, task: Task, processes: Processes | None = None
    ) -> None:
        path, start, later, snapshot = attempt
        layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
        newest = math.inf if path == self._attempts[-1] else attempts.kept_upto(later)
        restored = None
        if start.snapshot is not None and snapshot is None:
            restored = self._bases.get(start.snapshot)
            if restored is None and start.snapshot > newest:
                raise SnapshotMismatch(
                    f"snapshot {start.snapshot} was damaged later, and another one has its number now"
                )
            restored = restored or self._snapshots.restore(start.snapshot, layout)
        self._bases = {number: base for number, base in self._bases.items() if number <= (start.snapshot or 0)}
        job = replace(private_job(plan, strategy, task, layout, self._directory, restored), starts=start.starts)
        until = self._until
        if until is not None and any(until > after.updates for after in later):
            until = None
        dropped = bool(later) and until is None  # what is done behind the snapshots, or all if there were none
        keep = attempts.made_for(start, later) if dropped else set()
        observer = Observer(
            self._directory, until=until, check=self._check, around_nan=self._around_nan, keep=keep, newest=newest
        )
        observer.replay = replay = (
            GroupReplay(job, path, observer, processes, updates=start.updates)
            if isinstance(processes, GroupedReplicas)
            else Replay(job, path, observer, processes, updates=start.updates, snapshot=snapshot)
        )
        if snapshot is not None:
            versions = [shard.version for shard in replay.shards]
            self._snapshot, self._since = snapshot, min(versions)
            if self._until is not None and self._until < max(versions):
                kept = f"the schedule is kept from snapshot {snapshot} (update {max(versions)}) on"
                raise ValueError(f"until is {self._until}: {kept}")
        self._observer = observer
        if processes is not None and (numbers := self._snapshots.numbers()):
            self._snapshots.manifest(numbers[-1]).check_examples(replay.job.task.examples)
        try:
            if not observer.begin():
                replay.run()
        finally:
            self._fingerprints += observer.fingerprints
            self._compared |= dict.fromkeys(observer.compared)
        whole = [number for number in keep if len(observer.kept[number]) == len(replay.shards)]
        self._bases |= {number: observer.restored(number) for number in whole}
        if replay.why and (len(whole) < len(keep) or not dropped):
            self._notes.append(replay.why)

    def _here(self, code: Code | ScriptCode, start: Start) -> Plan:
        """The attempt's plan, as it can be carried out here; what is different is noted."""
        plan = code["plan"]
        here = surroundings(plan.threads, "script" in code)
        for name, there in start.where.items():
            if here.get(name) != there:
                self._elsewhere[f"{name} is {here.get(name)} here and was {there}"] = None
        try:
            resolve_device(plan.device)
        except ValueError as error:
            self._elsewhere[f"the run was on {plan.device}, and is replayed on the CPU ({error})"] = None
            plan = msgspec.structs.replace(plan, device="cpu")
        return plan

    def result(self, seconds: float) -> Replayed:
        observer = self._observer
        assert observer is not None
        job, shards = observer.replay.job, observer.replay.shards
        model, vector = job.task.model, torch.zeros(job.layout.length)
        for shard in shards:
            known = observer.weights.get(shard.node)
            vector[shard.start : shard.stop] = shard.weights if known is None else known
        job.layout.read_model(vector, model)
        versions = tuple(
            shard.version if observer.until is None or not observer.reached else observer.until for shard in shards
        )
        return Replayed(
            directory=self._directory, model=observer.nan.model if observer.nan is not None else model.eval(),
            updates=min(versions), versions=versions, elsewhere=tuple(self._elsewhere),
            stopped="; ".join(self._notes), fingerprints=self._fingerprints, snapshots=tuple(self._compared),
            difference=observer.difference, nan=observer.nan, seconds=seconds, checked=self._check,
            until=self._until, strayed=self._strayed, around_nan=self._around_nan,
            snapshot=self._snapshot, since=self._since, passed=tuple(self._passed),
        )  # fmt: skip


def _in_groups(strategy: Strategy, folder: Path, parts: int) -> Processes:
    """Replicas in processes of their own, as many each as they had."""
    if isinstance(strategy.recipe().work, Collective):
        return GroupedReplicas(folder, parts)
    from squall.replaying.parted import PartedReplicas  # torch's compiler comes with it, before the forks

    return PartedReplicas(folder)


def _attempts(directory: Path) -> list[Path]:
    if found := attempts.paths(directory):
        return found
    load_code(directory)  # which says what is wrong with a directory of something else
    raise ValueError(
        f"{directory} has no schedule: nothing was trained, its disk was full, or an older version has recorded it"
    )
