"""World after world, until one breaks an invariant; that one is shrunk to the least that still breaks it.

python -m squall.sim.proof.soak --count 1000 [--first SEED] [--processes N] [--answers | --copies | --deputies]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import AsyncResult

from squall.sim.proof.answers import answering
from squall.sim.proof.backed import backed, deputed
from squall.sim.proof.broken import Broken
from squall.sim.proof.chaos import OFF, PREDICTION, Chaos, chaos, smaller
from squall.sim.proof.trace_lines import trace_line
from squall.sim.proof.trial import Seen, Trial

CHUNK = 20  # worlds that a process takes at a time
SHRINKS_AT_MOST = 2000  # worlds tried
SHOWN = 80  # last lines of a trace
# Of worlds, by flags of `squall simulate`.
KINDS: dict[str, Callable[[int], Chaos]] = {"": chaos, "answers": answering, "copies": backed, "deputies": deputed}
SIZES = ("replicas", "shards", "examples", "epochs", "machines", "parts")


@dataclasses.dataclass(frozen=True)
class WorldVerdict:
    """What became of a world."""

    chaos: Chaos
    events: int
    faults: dict[str, int]  # that happened, by kind
    error: str = ""  # what was broken; empty: nothing
    invariant: str = ""  # "I1" to "I9"; of another error its type

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items())) or "no faults"
        if not self.error:
            return f"{self.chaos}\nheld: {self.events} events, {faults}"
        return f"{self.chaos}\nBROKEN at event {self.events}: {self.error}"


def verdict(world: Chaos, watch: Callable[[Seen], None] | None = None, self_checks: bool = True) -> WorldVerdict:
    """Run a world to its end, or to the first thing that is wrong."""
    trial = Trial(world, watch, self_checks)
    try:
        trial.go()
    except Broken as broken:
        return WorldVerdict(world, trial.events, dict(trial.happened), str(broken), broken.invariant)
    except Exception as error:  # a machine was brought where it knows no further: that is as broken
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return WorldVerdict(world, trial.events, dict(trial.happened), text, type(error).__name__)
    return WorldVerdict(world, trial.events, dict(trial.happened))


def trace_of(world: Chaos) -> list[str]:
    """The world step by step, to its end or to what is wrong."""
    seen: list[Seen] = []
    found = verdict(world, seen.append)
    return [*map(trace_line, seen), *([f"BROKEN: {found.error}"] if found.error else [])]


def shrink(found: WorldVerdict) -> WorldVerdict:
    """The same broken with as few faults as possible, then as soon as possible.

    Faults that never came to happen are left out all at once, other things one at a time.
    """
    tried = 0
    while True:
        happened = tuple(fault for fault in found.chaos.faults if fault.at <= found.events)
        for candidate in [dataclasses.replace(found.chaos, faults=happened), *smaller(found.chaos)]:
            tried += 1
            attempt = verdict(candidate)
            if attempt.invariant == found.invariant and _length(attempt) < _length(found):
                found = attempt
                break
        else:
            return found
        if tried >= SHRINKS_AT_MOST:
            return found


def _length(found: WorldVerdict) -> tuple[int, int]:
    return len(found.chaos.faults), found.events


def rebuilt(
    seed: int, faults: Sequence[int] | None = None, kind: str = "", **changes: int | bool | float | None
) -> Chaos:
    """World `seed` of a kind (`KINDS`) with some of its faults alone (by their numbers), and other sizes."""
    world = KINDS[kind](seed)
    if faults is not None:
        world = dataclasses.replace(world, faults=tuple(world.faults[i] for i in faults))
    return dataclasses.replace(world, **changes)  # type: ignore[arg-type]


def add_kinds(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_mutually_exclusive_group()
    for kind, what in (
        ("answers", "nothing is trained, as squall predict"),
        ("copies", "each shard has a backup"),
        ("deputies", "so has the coordinator"),
    ):
        kinds.add_argument(
            f"--{kind}", dest="kind", action="store_const", const=kind, default="", help=f"of this kind: {what}"
        )


def soak(
    count: int | None = None, first: int = 0, processes: int = 1, make: Callable[[int], Chaos] = chaos
) -> Iterator[WorldVerdict]:
    """Verdicts of worlds `first`, `first` + 1 ..., in order; without a count for ever."""
    seeds = itertools.count(first) if count is None else iter(range(first, first + count))
    worlds = (make(seed) for seed in seeds)
    if processes == 1:
        yield from map(verdict, worlds)
        return
    context = multiprocessing.get_context("spawn")  # torch and fork do not go together
    with context.Pool(processes) as pool:
        pending: deque[AsyncResult[list[WorldVerdict]]] = deque()
        while chunk := list(itertools.islice(worlds, CHUNK)):
            pending.append(pool.apply_async(_verdicts, (chunk,)))
            if len(pending) > 2 * processes:
                yield from pending.popleft().get()
        for result in pending:
            yield from result.get()


def _verdicts(worlds: Sequence[Chaos]) -> list[WorldVerdict]:
    return [verdict(world) for world in worlds]


def report(found: WorldVerdict) -> str:
    """A world that broke, the least of it that does so still, and how to see it again."""
    least = shrink(found)
    return "\n".join([
        str(found), "", "the least of it that breaks the same:", str(least), "",
        *trace_of(least.chaos)[-SHOWN:], "", f"see it with: squall simulate {flags(least.chaos)} --trace",
    ])  # fmt: skip


def flags(world: Chaos) -> str:
    """What `squall simulate` needs to make this world from its seed."""
    kind = (
        "answers"
        if world.strategy == PREDICTION
        else "deputies"
        if world.deputy
        else "copies"
        if world.copies > 1
        else ""
    )
    whole = KINDS[kind](world.seed)
    found = [f"--seed {world.seed}", *([f"--{kind}"] if kind else [])]
    if world.faults != whole.faults:
        found.append(f"--faults {','.join(str(whole.faults.index(fault)) for fault in world.faults) or 'none'}")
    for name in SIZES:
        if getattr(world, name) != getattr(whole, name):
            found.append(f"--{name} {getattr(world, name)}")
    for name, (value, flag) in OFF.items():
        if getattr(world, name) == value != getattr(whole, name):
            found.append(flag)
    return " ".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m squall.sim.proof.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, help="worlds (default: until Ctrl-C)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one for each core")
    add_kinds(parser)
    options = parser.parse_args(arguments)
    make = KINDS[options.kind]
    began, worlds, events, faults = time.monotonic(), 0, 0, Counter[str]()
    status = 0
    try:
        for found in soak(options.count, options.first, options.processes, make):
            worlds, events = worlds + 1, events + found.events
            faults.update(found.faults)
            if found.error:
                status = 1
                _say(report(found))
                break
            if worlds % 1000 == 0:
                _say(_so_far(worlds, events, faults, time.monotonic() - began))
    except KeyboardInterrupt:
        pass
    _say(_so_far(worlds, events, faults, time.monotonic() - began))
    return status


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _so_far(worlds: int, events: int, faults: Counter[str], seconds: float) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    return f"{worlds} worlds, {events} events, {worlds / max(seconds, 1e-9):.0f} worlds/s; faults: {kinds}"


if __name__ == "__main__":
    sys.exit(main())
