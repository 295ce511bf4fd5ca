"""The attempts of a run, each with a schedule of its own: the fresh start, and every resume."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from squall.runtime.job import Job
from squall.runtime.schedule import FORMAT, Damaged
from squall.runtime.snapshot import second_name
from squall.strategies.work import Answering, Collective
from squall.version import __version__


class Start(msgspec.Struct, frozen=True):
    """What an attempt began from, and where it ran."""

    format: int
    snapshot: int | None  # that it went on from
    updates: int  # in that snapshot
    where: dict[str, str]  # what the bits of a result depend on, beside the code
    kept: bool = True  # there is a schedule
    end_alone: bool = False  # only its end is kept: newer snapshots remove what went before
    starts: tuple[int, ...] = ()  # where the stages of a pipeline begin, which was measured
    forked: bool = False  # its replicas can only be replayed in processes of their own


def read_start(path: Path) -> Start:
    """Of an attempt's directory. Raises `Damaged` for one of another version, too."""
    try:
        data = (path / "start.json").read_bytes()
        version = msgspec.json.decode(data)["format"]
        if version != FORMAT:
            raise Damaged(f"{path} is a schedule of format {version}, and this version of Squall reads format {FORMAT}")
        start = msgspec.json.decode(data, type=Start)
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise Damaged(f"{path / 'start.json'} cannot be read: {error}") from error
    if not start.kept:
        why = "with --keep-schedule none, or with AllReduce"
        how = "in one process, on GPUs, of a script, or with a divided optimizer"
        raise Damaged(f"{path} holds no schedule: its attempt ran {why} {how}")
    return start


def readable(paths: list[Path], notes: list[str]) -> list[Start]:
    """Up to the first that cannot be read, which goes into `notes`; raises `Damaged` if none can."""
    starts: list[Start] = []
    for path in paths:
        try:
            starts.append(read_start(path))
        except Damaged as damaged:
            if not starts:
                raise
            notes.append(str(damaged))
            break
    return starts


def kept_upto(later: Sequence[Start]) -> int:
    """The newest snapshot of an attempt that no later one has thrown away, to give its number again."""
    return min((start.snapshot or 0 for start in later), default=0)


def made_for(start: Start, later: Sequence[Start]) -> set[int]:
    """Snapshots of an attempt that later ones went on from: the next one, and others that found that one damaged."""
    found, newest = set(), math.inf
    for after in later:
        number = after.snapshot or 0
        if (start.snapshot or 0) < number < newest:
            found.add(number)
        newest = min(newest, number + 1)
    return found


def surroundings(threads: int, script: bool) -> dict[str, str]:
    """What decides about the last bits of a result here."""
    found = {
        "torch": str(torch.__version__),
        "squall": __version__,
        "numpy": np.__version__,
        "CPU": _cpu(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads),
    }
    if script:
        found["PYTHONHASHSEED"] = os.environ.get("PYTHONHASHSEED", "")
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def begin(job: Job, script: bool = False) -> Job:
    """The job with a directory for its schedule; without one where the plan keeps none.

    Where it cannot be written the run goes on without, with a warning. The run's code lies beside the schedule,
    because a resume may change the strategy.
    """
    if isinstance(job.recipe.work, Answering):
        return job
    home = job.directory / "schedule"
    restored = job.restored
    start = Start(
        FORMAT, restored.manifest.number if restored is not None else None,
        restored.updates if restored is not None else 0, surroundings(job.plan.threads, script),
        kept=job.plan.settings.keep_schedule != 0 and _is_replayed(job, script),
        end_alone=job.plan.settings.last_snapshots > 0, starts=job.starts, forked=_has_groups(job),
    )  # fmt: skip
    try:
        path = home / str(max(numbers(job.directory), default=-1) + 1)
        path.mkdir(mode=0o700, parents=True)
        (path / "start.json").touch(mode=0o600)
        (path / "start.json").write_bytes(msgspec.json.format(msgspec.json.encode(start)))
        if (code := job.directory / "code.pickle").exists():  # but in benchmarks and tests; a resume replaces the file
            second_name(code, path / "code.pickle")
    except OSError as error:
        sys.stderr.write(f"squall: warning: {home} cannot be written ({error.strerror}): there will be no replay\n")
        return job
    return dataclasses.replace(job, schedule=path) if start.kept else job


def _is_replayed(job: Job, script: bool) -> bool:
    """All-reduce is where each member is a process, on the CPU, and no script has the loop."""
    if isinstance(job.recipe.work, Collective):
        plan = job.plan
        return plan.settings.launcher != "inline" and plan.device == "cpu" and not (job.recipe.divided or script)
    return True


def _has_groups(job: Job) -> bool:
    """Whether processes compute together, so that a replay needs as many."""
    return job.plan.settings.parts > 1 or isinstance(job.recipe.work, Collective)


def paths(directory: Path) -> list[Path]:
    """Of the attempts that a run has a schedule of, oldest first."""
    return [directory / "schedule" / str(number) for number in numbers(directory)]


def numbers(directory: Path) -> list[int]:
    """The attempts that a run has a schedule of, oldest first."""
    return sorted(int(path.name) for path in (directory / "schedule").glob("*") if path.name.isdecimal())
