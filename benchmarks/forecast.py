"""What the simulator says this machine will do, against what it then does: samples a second, and mean staleness.

In every round the machine is measured as `squall measure` does, and then each setting is trained for some seconds.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import squall
from benchmarks.results import Section
from benchmarks.squall_training import STEADY_AFTER_S, downpour, steady, training_task
from benchmarks.workloads import Workload, digits_mlp, speech_mlp
from squall.record.rows import StalenessRow
from squall.report import Reader
from squall.sim.cluster.measure import measure as measure_machine
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.simulate import simulate
from squall.sim.planning.alone import stand_in

SECONDS = 6.0
SLOW = 0.25
THROUGHPUT_WITHIN, STALENESS_WITHIN = 0.15, 0.20


class Found(NamedTuple):
    samples_s: float
    staleness: float


def measure(repeats: int = 5) -> Section:
    print("forecast", flush=True)
    section = Section(
        "Forecasts",
        "The network of the throughput benchmark, and one so small (64-64-10, batch 32, digits) that a step takes a"
        " fraction of a millisecond, simulated on a cluster file that was measured just before, and as they then ran."
        " Ratio: simulated / real, the median of the rounds.",
    )
    _compared(section, "", speech_mlp(), settings, repeats)
    _compared(section, "small, ", digits_mlp((64,)), small_settings, repeats)
    return section


Settings = dict[str, tuple[squall.Strategy, float | None]]  # name -> strategy, its last replica's speed if another


def _compared(
    section: Section, prefix: str, workload: Workload, settings_of: Callable[[Workload], Settings], repeats: int
) -> None:  # fmt: skip
    said: dict[str, list[Found]] = defaultdict(list)
    done: dict[str, list[Found]] = defaultdict(list)
    for _ in range(repeats):
        cluster = measure_machine(training_task(workload), downpour(workload, 1), seconds=24, busy=True).cluster
        for name, (strategy, slow) in settings_of(workload).items():
            said[name].append(predicted(workload, strategy, cluster, slow))
            done[name].append(trained(workload, strategy, slow))
            print(f"  {prefix}{name}: {said[name][-1]} said, {done[name][-1]}", flush=True)
    compare(section, said, done, prefix)


def settings(workload: Workload) -> Settings:
    found: Settings = {f"downpour, {n} replica{'s' * (n > 1)}": (downpour(workload, n), None) for n in (1, 2, 3, 4)}
    found["downpour, 2 replicas, one at a quarter of its speed"] = (downpour(workload, 2), SLOW)
    found["downpour, 2 replicas, every 8 steps"] = (downpour(workload, 2, exchange_every=8), None)
    optimizer = downpour(workload, 1).optimizer
    found["synchronous, 2 replicas"] = (squall.Synchronous(replicas=2, optimizer=optimizer), None)
    found["all-reduce, 2 replicas"] = (squall.AllReduce(replicas=2, optimizer=optimizer), None)
    found["bounded delay 1, 3 replicas, one at a quarter of its speed"] = (
        squall.BoundedDelay(replicas=3, optimizer=optimizer, max_delay=1), SLOW,
    )  # fmt: skip
    return found


def small_settings(workload: Workload) -> Settings:
    found = {name: each for name, each in settings(workload).items() if each[1] is None}
    return {"single process": (squall.SingleProcess(optimizer=downpour(workload, 1).optimizer), None), **found}


def predicted(
    workload: Workload, strategy: squall.Strategy, cluster: Cluster, slow: float | None = None, seconds: float = SECONDS
) -> Found:  # fmt: skip
    """Of a run of three times as many seconds."""
    # Of short steps thousands do as well; not where a group begins with a tenth of a second.
    brief = cluster.step_s(cluster.machines[0]) < 1e-3 and strategy.recipe().shards
    simulated_s = 1.0 if brief else 3 * seconds
    settings = squall.Settings(threads=1, seconds=simulated_s, snapshot_every_s=None, slow=slow)
    elements = sum(parameter.numel() for parameter in workload.model().parameters())
    strategy, cluster = stand_in(strategy, cluster, elements)
    forecast = simulate(training_task(workload), strategy, cluster, gradients="none", settings=settings)
    return Found(forecast.examples_per_second, forecast.staleness_mean or 0.0)


def trained(workload: Workload, strategy: squall.Strategy, slow: float | None) -> Found:
    settings = squall.Settings(
        threads=1, seconds=SECONDS + STEADY_AFTER_S, snapshot_every_s=None, progress=False, slow=slow
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        return found(squall.fit(training_task(workload), strategy, run_dir=Path(folder) / "run", settings=settings))


def found(run: squall.Run) -> Found:
    """Of a run that was steady after a second."""
    reader = Reader(run.directory / "run.sqlite")
    rows = [row for row in reader.rows(StalenessRow) if row.time_s >= STEADY_AFTER_S]
    reader.close()
    pushes = sum(row.count for row in rows)
    stale = sum(row.staleness * row.count for row in rows) / pushes if pushes else math.nan
    return Found(steady(run), stale)


def compare(section: Section, said: dict[str, list[Found]], done: dict[str, list[Found]], prefix: str = "") -> None:
    for name in said:
        what = prefix + name
        _compare(section, f"{what}, samples/s", _of(said, name, 0), _of(done, name, 0), THROUGHPUT_WITHIN)
        if statistics.median(_of(done, name, 1)) > 0:
            _compare(section, f"{what}, mean staleness", _of(said, name, 1), _of(done, name, 1), STALENESS_WITHIN)


def _of(found: dict[str, list[Found]], name: str, field: int) -> list[float]:
    return [values[field] for values in found[name]]


def _compare(section: Section, what: str, said: list[float], done: list[float], within: float) -> None:
    ratio = statistics.median(a / b for a, b in zip(said, done))
    figures = [f"{statistics.median(values):,.3g}" for values in (said, done)]
    section.within(what, figures[0], f"real {figures[1]}", ratio, within)


if __name__ == "__main__":
    print(measure().markdown())
